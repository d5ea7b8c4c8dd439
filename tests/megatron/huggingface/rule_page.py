"""The page of rule files, made of the tables they are read by: `python -m tests.megatron.huggingface.rule_page`."""

from collections.abc import Iterable

from ckpt_tools.megatron.huggingface.config.codecs import DEFAULTS, FORMS
from ckpt_tools.megatron.huggingface.families import families
from ckpt_tools.megatron.huggingface.families.file_places import first_line
from ckpt_tools.megatron.huggingface.families.rule_items import pieces
from ckpt_tools.megatron.huggingface.mapping.layouts import JOINED, LAYOUTS
from ckpt_tools.megatron.huggingface.mapping.rules import CONDITIONS, DIMENSIONS
from tests.conftest import REPO

PAGE = REPO / ".github" / "docs" / "formats" / "rule-files.md"
KINDS = ("rules", "fields", "needs", "fixed", "copies")
HEAD = """\
# Rule files

One more family of Hugging Face models, in YAML: `import-hf` and `export-hf` take it with `--rules FILE`.
[A whole one with comments](../../../example-scripts/huggingface_family.yaml) is the best start, or the nearest
[family](families.md), which is such a file too. A mistake is an error with its line, and names what was meant.

```yaml
{keys}
```

{rest}

Models that transformers 5 saved say rotation in one set, `rope_parameters`, and both spellings are read. To write
that one, name the piece after those that have `rope_theta`: `fields: [dense, rope_parameters]`, or
`partial_rope_parameters` where the class may rotate a part of each head.
"""


def page() -> str:
    """The page, as it is to be."""
    keys, _, rest = (
        (families.__doc__ or "").partition("\n\nfamily: ")[2].partition("\n\nA variant of a known family")
    )
    sections = [
        HEAD.format(keys=f"family: {keys}", rest=f"A variant of a known family{rest}".strip()),
        table("Forms of fields", "form", "what config.json has", {name: one.says for name, one in FORMS.items()}),
        table("Defaults of fields", "default_by", "what the class takes",
              {name: first_line(one) for name, one in DEFAULTS.items()}),
        table("Layouts", "layout", "how Megatron's parameter lies in the tensors",
              {f"{name}` ({count})": first_line(one) for name, (count, one) in LAYOUTS.items()}),
        table("Layouts of parts", "layout", "how parts (`parts`) lie in their one tensor",
              {name: first_line(one) for name, one in JOINED.items()}),
        names("Sizes (`shape`)", DIMENSIONS),
        names("Conditions (`when`)", CONDITIONS),
        *(names(f"Pieces of {kind}", pieces().data[kind]) for kind in KINDS),
    ]  # fmt: skip
    return "\n".join(sections)


def table(title: str, name: str, what: str, rows: dict[str, str]) -> str:
    """A section of words, each with what it says."""
    lines = (f"| `{one}{'' if '`' in one else '`'} | {said} |\n" for one, said in rows.items())
    return f"## {title}\n\n| `{name}` | {what} |\n|---|---|\n{''.join(lines)}"


def names(title: str, known: Iterable[str]) -> str:
    """A section of words alone."""
    return f"## {title}\n\n{', '.join(f'`{one}`' for one in known)}\n"


if __name__ == "__main__":
    PAGE.write_text(page())
