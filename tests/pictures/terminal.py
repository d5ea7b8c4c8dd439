"""Draw `.github/terminal.svg`, the README's picture: real commands, run on a terminal, long output cut.

python -m tests.pictures.terminal
"""

import io
import re
import shlex
import shutil
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tests.cli.terminal import on_a_terminal
from tests.conftest import DATA, REPO

PICTURE = REPO / ".github" / "terminal.svg"
WIDTH = 106  # columns
_COLUMN = 12.2  # units of the picture
# Command, and how many lines of it are shown from its start and its end.
SHOWN = [
    ("convert llama llama_fsdp --gpus 4", 7, 0),
    ("diff llama llama_fsdp", 0, 1),
    ("preflight llama_fsdp", 10, 5),
]


def record() -> list[Text]:
    """The lines of the picture."""
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(DATA / "core019_llama_tp2_fully_reshardable", Path(folder, "llama"))
        for words, first, last in SHOWN:
            lines.append(Text.assemble(("$ ", "bold green"), (f"checkpoint-inspector {words}", "bold")))
            printed = (
                on_a_terminal(shlex.split(words), Path(folder), COLUMNS=str(WIDTH)).strip("\n").split("\n")
            )
            printed = [line for line in printed if re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).strip()]
            printed = [line for line in printed if "━" not in line]  # a progress bar shows the time
            printed = [line.replace(str(Path(folder).resolve()), "/checkpoints") for line in printed]
            shown = [Text.from_ansi(line.rstrip()) for line in printed]
            if len(shown) > first + last:
                shown = [*shown[:first], Text("  ...", "dim"), *(shown[-last:] if last else [])]
            lines += [*shown, Text()]
    return lines[:-1]


def draw(lines: list[Text]) -> str:
    """The picture; it asks for no font from elsewhere."""
    console = Console(
        record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    for line in lines:
        console.print(line, soft_wrap=True)
    svg = console.export_svg(title="checkpoint-inspector", unique_id="terminal")
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL).replace("Fira Code", "DejaVu Sans Mono")
    return re.sub(r'x="([\d.]+)" (y="[\d.]+") textLength="([\d.]+)"([^>]*>)((?:&#160;)+)', _indent, svg)


def _indent(text: re.Match[str]) -> str:
    """A text that starts where its first letter is: some viewers drop leading spaces."""
    spaces = len(text[5]) // len("&#160;") * _COLUMN
    return f'x="{float(text[1]) + spaces:g}" {text[2]} textLength="{float(text[3]) - spaces:g}"{text[4]}'


if __name__ == "__main__":
    PICTURE.write_text(draw(record()))
