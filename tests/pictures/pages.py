"""Take the pictures of `.github/docs/pictures`: pages that the program makes of checkpoints here, seen by Chromium.

python -m tests.pictures.pages

Look at each afterwards: nothing but an eye sees what is wrong with a page.
"""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from ckpt_tools.cli.app import run
from tests.altered import without_numbers
from tests.conftest import REPO, RUN, fixture_dir

PICTURES = REPO / ".github" / "docs" / "pictures"
FSDP = fixture_dir("core019_llama_tp2_native_fsdp_dtensor")  # the same model, trained by Megatron-FSDP
# What a reader would click: the first tensor of the embedding and of the first layers.
_OPEN = "<script>for(let i=0;i<2;i++)document.querySelectorAll('#tree summary')[i].click()</script>"


class Shot(NamedTuple):
    """A command that makes a page, the window it is seen in, and what is clicked."""

    words: str
    width: int
    height: int
    script: str = ""


SHOWN = {
    "inspect": Shot("inspect RUN", 1600, 900, _OPEN),
    "inspect-400": Shot("inspect RUN", 400, 800, _OPEN),
    "stats": Shot("stats BAD", 1600, 1250),
    "stats-change": Shot("stats RUN FSDP", 1600, 950),
    "stats-400": Shot("stats BAD", 400, 1000),
    "plan": Shot("plan RUN --gpus 4", 1600, 720),
    "plan-400": Shot("plan RUN --gpus 4", 400, 700),
}


def take(name: str, folder: Path) -> None:
    """One picture; `folder` holds the checkpoints under the names of the documents."""
    shot = SHOWN[name]
    page = folder / f"{name}.html"
    before = Path.cwd()
    os.chdir(folder)
    try:
        assert run([*shot.words.split(), "--html", str(page), "-q"]) == 0
    finally:
        os.chdir(before)
    page.write_text(page.read_text().replace("</body>", f"{shot.script}</body>"))
    # --no-sandbox: root has none; --force-device-scale-factor: a pixel of the page is one of the picture
    subprocess.run(
        ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
         "--force-device-scale-factor=1", f"--window-size={shot.width},{shot.height}",
         f"--screenshot={PICTURES / name}.png", page.as_uri()],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip


if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        shutil.copytree(RUN, Path(place, "RUN"))
        shutil.copytree(FSDP, Path(place, "FSDP"))
        without_numbers(RUN, Path(place, "BAD"), "output_layer.weight")
        for name in SHOWN:
            take(name, Path(place))
