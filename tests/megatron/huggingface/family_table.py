"""The page of families, made of the lists that tests go by: `python -m tests.megatron.huggingface.family_table`.

Which classes a release of transformers has stands in tests/data/transformers_classes.txt; tests under that release
compare it with what is there.
"""

from ckpt_tools.megatron.huggingface.families.families import FAMILIES
from ckpt_tools.megatron.huggingface.families.identify import without_modules
from ckpt_tools.megatron.huggingface.vision.vision_language import vision_language, vision_language_types
from tests.conftest import DATA, REPO
from tests.megatron.huggingface.models import CONFIGS, NOT_IN_MEGATRON, family_of
from tests.peers.test_vision_language import CASES as BRIDGE

PAGE = REPO / ".github" / "docs" / "formats" / "families.md"
# Of what core 0.16.1 is given to run them (megatron_logits.py).
GIVEN = {
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), "with core 0.19's rotation of the indexer"),
    **dict.fromkeys(("minimax_m2", "olmoe"), "with Bridge's norms over all heads"),
    "gemma": "with Bridge's scaled embedding",
}
# Language models inside vision-language ones, by test_towers_peers.py: the family of Megatron that they become.
INSIDE = {"qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3", "qwen3_vl_moe_text": "qwen3_moe"}
WHOLE = """
## Vision-language models

With all their towers, in checkpoints of Megatron-Bridge's models; rules for vision tower and projector stand in
`ckpt_tools/megatron/huggingface/vision/model_files`, with the fields of config.json that change what they
compute: a run and a config.json with different ones are not taken for one model. Cells as above, logits with an image
among the tokens.

* **Bridge**: models of megatron-bridge 0.3.1, built on CPUs with tensor parallel sizes 1 and 2 and loaded by Bridge
  itself, save what an import makes, and are exported as what they were loaded from; `mapping`: by its published
  mapping alone; `-`: it has no such model, and `--tower language` converts the language model

| model_type | architecture | language model | bits | 4.57 | 5.24 | Bridge |
|---|---|---|---|---|---|---|
"""
HEAD = """\
# Families

{architectures} architectures of `transformers` go both ways, by {types} names of `model_type`. A cell says what a
test shows, with tiny models of random weights; the table is made of the lists that those tests go by.

* **bits**: import and export give the same names and bits, and every field of config.json comes back
* **4.57, 5.24**: so with a model that transformers 4.57.6 or 5.24.0 makes: it loads what is exported, completely, and
  computes the same logits (difference 0); `-` where that release has no such class
* **core**: what is imported computes the logits of transformers when megatron-core 0.16.1 runs it on a CPU (kernels
  of gated delta nets and Mamba in plain torch), and its `sharded_state_dict` writes the same keys. `mapping`: names
  and layouts are those of the published mapping alone (Megatron-Bridge's, or the model's own code), as that release
  has no such module, or no transformers has such a class; `as` another: it is that family there

| model_type | architecture | bits | 4.57 | 5.24 | core |
|---|---|---|---|---|---|
"""
REGISTERED = """
## What Megatron-Bridge registers

{count} architectures, in its sources of {date}. By the rules above go {whole}. The others are refused:

"""
NO_RULES = "a model of several parts without rules; its language model alone, where that is a family above"
OTHER_KINDS = {
    **dict.fromkeys(("FluxTransformer2DModel", "WanTransformer3DModel"), "makes pictures or films"),
    **dict.fromkeys(
        ("LLaDAModelLM", "NemotronLabsDiffusionModel"), "writes by diffusion, not token after token"
    ),
}


def bridge_section() -> str:
    """What becomes of each architecture that Megatron-Bridge has a mapping for."""
    head, *lines = (DATA / "bridge_architectures.txt").read_text().splitlines()
    rows = (line.partition(":") for line in lines)
    kinds = {name: kind.strip() for name, _, kind in rows}
    known = {kind for name, one in FAMILIES.items() for kind in (one.model_type or name, *one.also_types)}
    known |= {kind for kind in vision_language_types() if vision_language(kind).rules}
    rest: dict[str, list[str]] = {}
    for name, kind in kinds.items():
        if kind not in known:
            why = without_modules().get(kind) or OTHER_KINDS.get(name, NO_RULES)
            rest.setdefault(why, []).append(f"`{name}`")
    whole = len(kinds) - sum(map(len, rest.values()))
    said = REGISTERED.format(count=len(kinds), date=head.rpartition("(")[2].rstrip(")."), whole=whole)
    return said + "".join(f"* {', '.join(names)}: {why}\n" for why, names in rest.items())


def classes() -> dict[str, set[str]]:
    """Configuration classes of tiny models, by the release of transformers that has them."""
    lines = (DATA / "transformers_classes.txt").read_text().splitlines()
    rows = (line.partition(": ") for line in lines if not line.startswith("#"))
    return {release: set(names.split()) for release, _, names in rows}


def page() -> str:
    """The page, as it is to be."""
    releases = list(classes().values())
    rows, types = [], 0
    for name, family in FAMILIES.items():
        words = (family.model_type or name, *family.also_types)
        types += len(words)
        variants = [variant for variant in CONFIGS if family_of(variant) == name]
        loaded = [any(CONFIGS[one][0] in release for one in variants) for release in releases]
        ran = any(loaded) and any(variant not in NOT_IN_MEGATRON for variant in variants)
        core = GIVEN.get(name, "yes") if ran else "mapping"
        if name in INSIDE:
            loaded, core = [True for _ in releases], f"as `{INSIDE[name]}`"
        cells = [", ".join(f"`{one}`" for one in words), f"`{family.architecture}`", "yes"]
        cells += ["yes" if one else "-" for one in loaded]
        rows.append(f"| {' | '.join(cells)} | {core} |")
    head = HEAD.format(architectures=len(FAMILIES), types=types)
    return head + "\n".join([*rows, WHOLE]) + whole_models() + bridge_section()


def whole_models() -> str:
    """The rows of vision-language models."""
    rows = ""
    for name in vision_language_types():
        kind = vision_language(name)
        tested = "yes" if kind.rules else "language model"
        bridge = "yes" if name in BRIDGE else "mapping" if kind.rules else "-"
        rows += f"| `{name}` | `{kind.architecture}` | `{kind.language}` | {' | '.join([tested] * 3)} | {bridge} |\n"
    return rows


if __name__ == "__main__":
    PAGE.write_text(page())
