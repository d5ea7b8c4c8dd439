"""Families as YAML files: those that are known (family_files/), each read when it is asked for, and a user's.

A whole family, where `fields` is a list:

family: mymodel               # its name; a known family of that name is replaced
architecture: MyForCausalLM
model_type: my_model          # that of config.json (--hf-config, or the model to import), which chooses the family;
                              # without it: the name. `also_types: [...]`: further ones of the same class
names: {mlp: feed_forward.}   # what `<mlp>` in the rules of pieces means (pieces.yaml has them all)
fields:                       # config.json's fields: names of pieces (pieces.yaml), and mappings of one's own
  - attention
  - ffn
  - head_dim: kv_channels     # which setting of ModelArgs it is; must be there
    use_qk_norm: {setting: qk_layernorm, default: false}   # what the class takes without it, or `default_by`: a
                              # function of the config (forms.py, DEFAULTS)
    n_shared: {setting: moe_shared_expert_intermediate_size, default: null, form: shared_experts}
                              # `form`: how the two sides write it (forms.py, FORMS). `wins`: which value is
                              # taken where checkpoint and reference differ (reference, checkpoint; either: the
                              # known one). `also`: another name that is read
    mlp_bias: null            # not the field that a piece has
defaults: {rope_theta: 1.0e+6} # what this class takes without a field of a piece
fixed: [silu, {clip: false}]  # config.json's fields with one value, or {one_of: [...]}
needs: [gqa, {qk_layernorm: true}]  # Megatron settings without which the model is not of this family: of ModelArgs,
                              # or such that arguments.yaml refuses otherwise and this architecture computes
rules:
  - ends
  - self_attention
  - core: decoder.layers.{l}.mlp.linear_fc2.weight   # {l} a layer, {e} an expert, {m} a prediction module
    hf: <layer>mlp.down.weight     # one tensor or a list, as many as the layout has (layouts.py)
    layout: same
    shape: [hidden, ffn]      # names of sizes (rules.py, dimensions)
    when: [dense]             # of models, or of layers, where all of these hold (rules.py, CONDITIONS)
    also: other.name          # further names that Megatron gives it
    norm: true                # may be stored as weight - 1: `plus_one: true` says that the class computes 1 + weight
    dtype: float32            # kept whatever is asked
    fused: model.all          # a tensor of all experts, or another name, that readers accept in place of `hf`
    plain: true               # a norm with a weight that a class of 1 + weight takes unchanged
    parts: {z: mamba_inner, x: mamba_inner}  # with {p} in `core`: parameters that are one tensor, with the names of
                              # their rows; `shape` has the other sizes, `layout` is one of JOINED (layouts.py)
  - {when: [moe], rules: [moe_norm, router]}  # rules, those of pieces too, under one more condition
mtp: true                     # decoder layers' rules go for the layer inside a prediction module too; `dense`: those
                              # of dense layers, whatever the last layer is
settings: [index_topk]        # Megatron arguments beyond those of ModelArgs that `fields` carry
dimensions: {lora: q_lora_rank}                     # further sizes: settings
conditions: {windowed: sliding_layers, wide: {setting: v_head_dim, is: [128, 256]}}   # further words for `when`
ignored: ['rotary_emb\\.inv_freq']  # Hugging Face tensors without content
copies: [mtp]                 # embedding and head, stored again in each prediction module
unset: [pad_token_id]         # fields that are written as null
published: Megatron-Bridge    # the project with these layers' modules, if plain Megatron-LM has none: said on import
written: {pad_token_id: null} # fields that are written so, whatever a reference says: with another value the class
                              # changes the weights that it loads
window_turn: 6                # the last of so many layers sees all keys

A variant of a known family needs less: `like: llama` (the default where `fields` is not a list) copies its rules,
fields and demands; `fields` and `rules` replace those of the same name (`FIELD: null`: it has none), `without`
names rules that are not copied. With `needs: {multi_latent_attention: false}`, a family like one that has it
takes the attention of Llama and Qwen in its place: q_proj to o_proj, q_norm and k_norm, head_dim.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from ckpt_tools.errors import CkptError, UsageError, list_problems
from ckpt_tools.formats.untrusted_documents import DocumentError, read_named_file
from ckpt_tools.megatron.huggingface.config.codecs import Field
from ckpt_tools.megatron.huggingface.families.family_file import fields_of_pieces, is_whole, read_family
from ckpt_tools.megatron.huggingface.families.file_places import not_one_of, parse_rule_source
from ckpt_tools.megatron.huggingface.mapping.rules import Family

FOLDER = Path(__file__).parent / "family_files"
TYPES = re.compile(
    r"^(?:model_type|also_types): *(.*?) *(?:#.*)?$", re.M
)  # a line, so that nothing has to be parsed


class Families(Mapping[str, Family]):
    """The known families by name, a user's `own` in front of them; a file is parsed when its family is asked for."""

    def __init__(self, own: Family | None = None) -> None:
        self.own = own

    def __getitem__(self, name: str) -> Family:
        if self.own is not None and name == self.own.name:
            return self.own
        if name not in family_names():
            raise KeyError(name)
        return _family(name)

    def __iter__(self) -> Iterator[str]:
        own = () if self.own is None else (self.own.name,)
        return iter((*own, *(name for name in family_names() if name not in own)))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def that_may_be(self, model_type: str) -> list[str]:
        """Names of the families that a config.json of this model_type may be of: one, as a rule."""
        own = [] if self.own is None else [self.own.name]
        return own + [name for name in family_names() if name == model_type or model_type in _types()[name]]


@cache
def family_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


@cache
def _text(name: str) -> str:
    return (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")


@cache
def _types() -> dict[str, frozenset[str]]:
    """The model types that each file names, read as text."""
    return {
        name: frozenset(word for line in TYPES.findall(_text(name)) for word in re.findall(r"[\w.-]+", line))
        for name in family_names()
    }


@cache
def _family(name: str) -> Family:
    source = parse_rule_source(_text(name), f"{name}.yaml", ours=True)
    top = source.top
    family = read_family(top, None, None) if is_whole(source.data) else None
    if family is None or top.problems or family.name != name:
        text = f"{FOLDER / name}.yaml does not say the family {name}:\n{list_problems(top.problems)}"
        raise CkptError(text, top.problems)
    return family


FAMILIES = Families()


def known_fields(hf: str | None = None) -> Iterator[Field]:
    """The fields of the known families; those of one name also from pieces, which come first."""
    if hf is not None:
        yield from fields_of_pieces().get(hf, ())
    for name in family_names():
        if hf is None or hf in _text(name):
            yield from (one for one in FAMILIES[name].fields if hf in (None, one.hf))


def load_rule_file(path: str | Path) -> Family:
    try:
        source = parse_rule_source(read_named_file(Path(path)))
    except (OSError, DocumentError) as error:
        raise UsageError(f"{path}: {error}") from error
    data, top = source.data, source.top
    like = data.get("like", "llama") if isinstance(data, dict) and not is_whole(data) else None
    base = family = None
    if not isinstance(data, dict):
        top.fault("expected a mapping")
    elif isinstance(like, str) and like in FAMILIES:
        base = FAMILIES[like]
    elif not is_whole(data):
        (top / "like").fault(not_one_of(like, "families", FAMILIES))
    if not top.problems:
        family = read_family(top, base, known_fields)
    if top.problems or family is None:
        text = f"{path}: the rule file cannot be used:\n{list_problems(top.problems)}"
        raise UsageError(text, top.problems)
    return family
