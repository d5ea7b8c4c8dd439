"""The manual: summaries, examples and exit codes of `--help`. A test runs every example."""

from __future__ import annotations

import re
from typing import NamedTuple

PROGRAM = "checkpoint-inspector"
LOOK, CHECK, CONVERT, EDIT = "Look", "Check", "Convert and launch", "Edit"
OTHER_NAMES = "Other names"  # NVIDIA's: they work, and the list of commands leaves them out

PLACEHOLDERS = {
    "RUN": "a run with torch_dist checkpoints",
    "FSDP": "one with fsdp_dtensor checkpoints",
    "HF": "a Hugging Face model",
    "VL": "a vision-language model",
    "TEXT": "a run with its language model",
    "LONG": "a run with several iterations",
    "LORA": "a Megatron adapter (LoRA) of RUN's model",
    "PEFT": "a PEFT adapter of HF",
    "BAD": "a run with a damaged checkpoint",
    "DUMP": "a dump of --dump-param-to-param-group-map",
    "OUT": "what will be made",
}
GLOSSARY = ".github/docs/glossary.md in the repository"
EXIT_CODES = {
    0: "done; equal; valid; ready",
    1: "different; not valid; not ready; nothing to repair (repair)",
    2: "usage: also a refused output, impossible parallel sizes, too little memory",
    3: "not a checkpoint, or of a format that is not read",
    4: "corrupt or hostile input",
    5: "mapping: an unknown key, a shape clash, a missing parameter group",
    6: "not proven: values are not what they must be",
    7: "storage: disk full, permission, I/O error",
    130: "interrupted: nothing was published; --resume continues",
    143: "terminated: nothing was published; --resume continues",
}


class Page(NamedTuple):
    """A command's entry in the list of commands, and its examples: what is wanted, and the words that do it."""

    section: str
    summary: str  # at most 42 characters, so that the list fits 80 columns
    examples: tuple[tuple[str, str], ...]


PAGES = {
    "inspect": Page(LOOK, "show what a checkpoint is and holds", (
        ("Everything that the metadata tells", "inspect RUN"),
        ("The tensors of one layer, as a tree", "inspect FSDP --keys '*.layers.0.*' --tree"),
        ("Where are its bytes?", "inspect RUN --by role --by layer --by rank"),
        ("As a page with a search", "inspect RUN --html OUT.html"),
        ("Another iteration than the tracker's, for a program", "inspect RUN --iteration 2 --json"),
    )),
    "print-tensor": Page(LOOK, "show a tensor: summary, or a part of it", (
        ("A summary", "print-tensor RUN decoder.final_layernorm.weight"),
        ("A part, as numpy writes it", "print-tensor RUN embedding.word_embeddings.weight --slice '0:2, :4'"),
        ("By the name of a parameter, and its role",
         "print-tensor RUN embedding.word_embeddings.weight --role exp_avg"),
        ("An object", "print-tensor FSDP opt_param_scheduler.max_lr"),
    )),
    "print-torch-dcp-in-json": Page(LOOK, "print all metadata of a DCP folder as JSON", (
        ("Keys, shapes, chunks and where their bytes lie", "print-torch-dcp-in-json RUN/iter_0000002 -o OUT.json"),
        ("The values of small objects too", "print-torch-dcp-in-json FSDP/iter_0000002 --values"),
        ("Turn a dump into its map file, in the same folder", "print-torch-dcp-in-json DUMP"),
    )),
    "ls": Page(LOOK, "list the iterations of a run, or the runs", (
        ("Which iterations are complete, and how large?", "ls RUN"),
        ("For a program", "ls FSDP --json"),
    )),
    "stats": Page(LOOK, "norms, NaN, Inf; what a training changed", (
        ("Norms by layer and role; is anything NaN?", "stats RUN"),
        ("In a script: exit code 1 if anything is NaN or Inf", "stats RUN --fail-on-nan"),
        ("As a page, with histograms", "stats FSDP --html OUT.html"),
        ("Every tensor of some names", "stats RUN --keys '*linear_fc2*' --role weight"),
        ("What has changed from one to the other", "stats RUN FSDP"),
    )),
    "plan": Page(CONVERT, "show what each rank gets, and its memory", (
        ("Bytes and memory of every rank of a job", "plan RUN --dp-shard 4"),
        ("Who owns what, as a picture", "plan RUN --dp-shard 4 --svg OUT.svg"),
        ("The boxes of some tensors, for a program", "plan RUN --dp-shard 2 --tensor '*linear_qkv*' --json"),
    )),
    "convert": Page(CONVERT, "convert to another format or job size", (
        ("For Megatron-FSDP on 4 GPUs: a file for each rank", "convert RUN OUT --gpus 4"),
        ("Back to 3D parallel, for any TP, PP and EP", "convert FSDP OUT --to torch_dist"),
        ("For Megatron-FSDP on any number of GPUs", "convert RUN OUT"),
        ("Read the output back before it is published", "convert RUN OUT --verify"),
        ("For any PyTorch program", "convert RUN OUT --to dcp"),
        ("In the fully_reshardable layout, for core 0.19", "convert RUN OUT --to torch_dist --target core-0.19"),
        ("For another release of Megatron, without a copy", "convert FSDP OUT --target core-0.17 --hard-link"),
        ("See what would happen", "convert RUN OUT --dry-run"),
        ("With four processes", "torchrun --nproc-per-node 4 -m ckpt_tools convert RUN OUT --resume"),
    )),
    "convert-torch-dist-to-fsdp-dtensor": Page(OTHER_NAMES, "the same as convert --to fsdp_dtensor", (
        ("As NVIDIA's guide does it", "convert-torch-dist-to-fsdp-dtensor --swiglu RUN/iter_0000002 OUT"),
        ("Weights alone, for a warm start",
         "convert-torch-dist-to-fsdp-dtensor RUN OUT --weights-only --dtype bfloat16"),
    )),
    "convert-fsdp-dtensor-to-torch-dist": Page(OTHER_NAMES, "the same as convert --to torch_dist", (
        ("Back to 3D parallel", "convert-fsdp-dtensor-to-torch-dist FSDP OUT"),
        ("As a job of core 0.16 names things", "convert-fsdp-dtensor-to-torch-dist FSDP OUT --target core-0.16"),
    )),
    "build-param-group-map": Page(CONVERT, "make NVIDIA's param_to_param_group_map", (
        ("Derive the map from a checkpoint", "build-param-group-map RUN -o OUT.json"),
        ("Which rule placed each parameter?", "build-param-group-map RUN --explain"),
        ("Take it from a dump", "build-param-group-map DUMP"),
    )),
    "export-hf": Page(CONVERT, "make a Hugging Face model", (
        ("A model directory for transformers", "export-hf RUN OUT"),
        ("With the tokenizer of the original", "export-hf FSDP OUT --hf-config HF"),
        ("In half precision and small files", "export-hf RUN OUT --dtype float16 --max-shard-size 2GB"),
        ("In block FP8, as DeepSeek-V3 is published", "export-hf RUN OUT --quantize fp8-block"),
        ("Trained text weights back into the vision-language model they came from",
         "export-hf TEXT OUT --hf-config VL --tower language"),
        ("An adapter as a PEFT directory", "export-hf LORA OUT --peft --hf-config HF"),
    )),
    "import-hf": Page(CONVERT, "start from a Hugging Face model", (
        ("For --finetune in 3D parallel", "import-hf HF OUT"),
        ("For Megatron-FSDP on 8 GPUs, with a fresh optimizer",
         "import-hf HF OUT --gpus 8 --lr 1e-5 --min-lr 1e-6 --weight-decay 0.1"),
        ("With an adapter merged in", "import-hf HF OUT --adapter PEFT"),
        ("A vision-language model with all its towers, for Megatron-Bridge", "import-hf VL OUT"),
        ("The language model of a vision-language model alone", "import-hf VL OUT --tower language"),
    )),
    "verify": Page(CHECK, "check that a checkpoint is intact", (
        ("Files, metadata and meaning, without reading tensors", "verify RUN"),
        ("Every byte: checksums, masters, NaN and Inf", "verify FSDP --content"),
        ("Every iteration of a run", "verify RUN --iteration all"),
        ("Remember the bytes; --manifest compares them later", "verify RUN --write-manifest OUT.json"),
        ("As annotations in a GitHub workflow", "verify RUN --format github --junit OUT.xml"),
    )),
    "diff": Page(CHECK, "compare two, also across formats", (
        ("A conversion with its source", "diff RUN FSDP"),
        ("Weights only", "diff RUN RUN --keys 'decoder.*'"),
        ("Names, shapes and types of an export and its source", "diff HF RUN --headers"),
        ("Up to rounding, in JSON", "diff RUN RUN --rtol 1e-6 --atol 1e-8 --json"),
    )),
    "compare-two-checkpoint": Page(OTHER_NAMES, "the same as diff", (
        ("As NVIDIA's script names it", "compare-two-checkpoint RUN RUN"),
        ("By the names of fsdp_dtensor", "compare-two-checkpoint RUN FSDP --by parameters"),
    )),
    "preflight": Page(CONVERT, "print the launch command, or check yours", (
        ("The command that resumes from it", "preflight FSDP"),
        ("The same for an older Megatron core", "preflight FSDP --target core-0.17"),
        ("Check a command line before a GPU is held",
         "preflight FSDP -- pretrain_gpt.py --use-megatron-fsdp --ckpt-format fsdp_dtensor --load FSDP"
         " --use-distributed-optimizer --no-gradient-accumulation-fusion --tensor-model-parallel-size 2"
         " --use-checkpoint-args --transformer-impl local --micro-batch-size 2 --bf16 --lr 0.01 --min-lr 0.001"
         " --train-iters 100 --eval-interval 50"),
    )),
    "modify-state-dict": Page(EDIT, "drop or rename keys", (
        ("Without the optimizer", "modify-state-dict RUN OUT --op 'remove optimizer\\..*'"),
        ("Under another prefix",
         "modify-state-dict FSDP OUT --op 'rename model\\.module\\.(.*) model.language_model.\\1'"),
    )),
    "slice": Page(EDIT, "keep a few layers: a small checkpoint", (
        ("The first layer, for a test", "slice RUN OUT --layers 0:1"),
        ("Of a block that has another name", "slice FSDP OUT --layers 0:1 --block decoder.layers"),
    )),
    "copy": Page(EDIT, "copy to another place, and check it", (
        ("To a bucket: s3://bucket/run instead of OUT", "copy RUN OUT"),
        ("Everything of a run; what exists is skipped", "copy FSDP OUT --iteration all"),
        ("And compare the copy once more", "copy HF OUT --read-back"),
    )),
    "average": Page(EDIT, "mean of several, or of a run's last N", (
        ("Equal shares; optimizer states are those of the last", "average RUN RUN OUT"),
        ("The last iterations of one run", "average LONG OUT --last 2"),
        ("With shares", "average FSDP FSDP OUT --weights 0.7,0.3"),
        ("As a moving average, for a program", "average RUN RUN RUN OUT --ema 0.9 --json"),
        ("Of Hugging Face models", "average HF HF OUT"),
    )),
    "merge-adapter": Page(EDIT, "merge a LoRA adapter into its base", (
        ("A Megatron adapter into its base", "merge-adapter RUN LORA OUT"),
        ("See what would happen", "merge-adapter RUN LORA OUT --dry-run"),
    )),
    "strip": Page(EDIT, "keep the weights, drop the optimizer", (
        ("Without optimizer, scheduler and rng states", "strip RUN OUT"),
        ("In half precision", "strip FSDP OUT --dtype bfloat16"),
        ("Of every iteration of a run", "strip RUN OUT --iteration all"),
        ("With a fresh optimizer", "strip FSDP OUT --fresh-optimizer --lr 1e-5 --min-lr 1e-6"),
        ("At once: no data file is copied, none is read", "strip FSDP OUT --hard-link --check-source none"),
    )),
    "repair": Page(EDIT, "correct keys that other programs got wrong", (
        ("A sound copy; what was wrong, and how that is known", "repair FSDP OUT"),
        ("See it first", "repair FSDP OUT --dry-run"),
    )),
}  # fmt: skip


def examples(name: str, most: int | None = None) -> str:
    """The first `most` examples of a command, or all, and what their placeholders are."""
    shown = "\n".join(f"  {what}:\n    {command_line(words)}" for what, words in PAGES[name].examples[:most])
    used = [f"  {name:<5} {what}" for name, what in PLACEHOLDERS.items() if re.search(rf"\b{name}\b", shown)]
    return "\n".join(["Examples:", shown, *(["where"] if used else []), *used])


def command_line(words: str) -> str:
    """An example to be typed, folded before options so that it fits 80 columns with its indent."""
    line = words if words.startswith("torchrun ") else f"{PROGRAM} {words}"
    lines = [""]
    for part in re.split(r"(?= -)", line):
        if lines[-1] and len(lines[-1] + part) > 72:
            lines.append(part[1:])
        else:
            lines[-1] += part
    return " \\\n        ".join(lines)


def closing() -> str:
    """The end of the program's own `--help`."""
    hidden = [name for name, page in PAGES.items() if page.section == OTHER_NAMES]
    codes = "\n".join(f"  {code:<5}{meaning}" for code, meaning in EXIT_CODES.items())
    return (
        "VERB --help shows the options that you need first, VERB --help-all shows all.\n"
        f"The names of NVIDIA's script work too: {', '.join(hidden)}.\n\nExit codes:\n{codes}\n\n"
        "Results go to stdout, everything else to stderr. Schemas of --json: ckpt_tools/schemas.\n"
        f"Words like root, master or loader: {GLOSSARY}\n"
        "For an automated assistant: --for-agents."
    )
