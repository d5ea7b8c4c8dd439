"""A Llama of released transformers under torch's `fully_shard`: saved by two processes, and what was exported loaded.

Run as a program, with that release first on PYTHONPATH: ``fully_sharded.py '<json>'``. To save, two ranks train for a
step and leave `dcp`, `hf` (config.json) and `truth.pt`, the whole tensors. To load, `from_pretrained` of `hf_out` is
compared with these, byte for byte.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

SIZES = {"vocab_size": 51, "hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}  # fmt: skip


def main() -> None:
    case = json.loads(sys.argv[1])
    if case["load"]:
        load(case)
        return
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(case["port"]), "OMP_NUM_THREADS": "1"}
    mp.start_processes(save, (case,), nprocs=2, start_method="fork")


def save(rank: int, case: dict[str, Any]) -> None:
    """One rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(5)
    out, config = Path(case["out"]), LlamaConfig(**SIZES, tie_word_embeddings=case["tied"])
    model = LlamaForCausalLM(config).to(getattr(torch, case["dtype"]))
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    tokens = torch.arange(8).reshape(2, 4) + rank
    model(input_ids=tokens).logits.logsumexp(-1).mean().backward()
    optimizer.step()
    weights = get_model_state_dict(model)
    dcp.save({"app": {"model": weights, "optim": get_optimizer_state_dict(model, optimizer)}},
             checkpoint_id=str(out / "dcp"))  # fmt: skip
    whole = {name: tensor.full_tensor() for name, tensor in weights.items()}
    if rank == 0:
        config.dtype = getattr(torch, case["dtype"])
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(out / "hf")
        torch.save(whole, out / "truth.pt")
    dist.barrier()
    dist.destroy_process_group()


def load(case: dict[str, Any]) -> None:
    """Fails where what transformers loads is not what was trained."""
    from transformers import LlamaForCausalLM

    out = Path(case["out"])
    truth = torch.load(out / "truth.pt", weights_only=True)
    model, told = LlamaForCausalLM.from_pretrained(
        out / "hf_out", torch_dtype="auto", output_loading_info=True
    )
    wrong = {name: list(found) for name, found in told.items() if found and name != "error_msgs"}
    assert not wrong, wrong
    state = model.state_dict()
    assert state.keys() == truth.keys()
    bits = {name: tensor.contiguous().view(torch.uint8) for name, tensor in state.items()}
    assert [n for n in truth if state[n].dtype != truth[n].dtype
            or not torch.equal(bits[n], truth[n].contiguous().view(torch.uint8))] == []  # fmt: skip


if __name__ == "__main__":
    main()
