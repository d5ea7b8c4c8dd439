"""Archives of folders that have much in common (`tests/data/packed`), unpacked when a test asks for one.

`python -m tests.data.pack [FOLDER ...]` writes the archives again: what GROUPS names is taken from the first FOLDER
that has it, and as it is packed now where none has.
"""

import fcntl
import io
import lzma
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

PACKED = Path(__file__).parent / "packed"
UNPACKED = PACKED.parents[2] / "build" / "test_data"

# Jobs of one family share weights, and cases were cut out of jobs: one dictionary for all of a group finds it. The
# fewer groups, the smaller; but whoever needs one folder unpacks its whole group.
GROUPS = {
    "cpu": (
        "bridge_dense_fr_tp2_dp2", "bridge_hfimport",
        "main_dense_dpr_pp2_vpp2_tied", "main_gdn_fr_tp2", "main_llava_fr_tp2", "main_mla_mtp_moe_fr_tp2",
        "main_moe_fr_ep2",
        "v011_dense_ms_tp2_dp1", "v013_dense_dpzero_tp2_dp2", "v013_dense_ms_tp2_dp2", "v013_moe_ms_ep2",
        "v014_dense_ms_tp2_dp2", "v014_dense_ms_tp2_dp2_te", "v014_moe_dpzero_ep2",
        "v015_dense_ms_tp2_dp1_torchadam", "v015_dense_ms_tp2_dp2", "v015_moe_ms_etp2_shared",
        "v016_dense_dpr_tp2_dp2", "v016_dense_fr_tp2_dp2_te", "v016_dense_nodistopt_tp2",
        "v016_dense_weightsonly_tp2",
    ),
    "two_gpus": (
        "core016_llama_tp2_dp_reshardable", "core016_llama_tp2_fully_reshardable",
        "core019_gpt3_tp2_fully_reshardable", "core019_gpt3_tp2_native_fsdp_dtensor",
        "core019_llama_dp2_dp_reshardable", "core019_llama_tp2_dp_reshardable",
        "core019_llama_tp2_native_fsdp_dtensor",
        "core019_moe_dp1_native_fsdp_dtensor", "core019_moe_ep2_fully_reshardable",
        "cases", "other_optimizers", "fully_shard",
    ),
    "te_dense": (
        "te_llama_dp2_buckets_fr", "te_llama_dp2_buckets_dpr", "tf2_dcp", "tf2_dist", "n_llama_dp2", "n_hsdp2",
        "te_remainder_tp2_fr", "te_remainder8_tp2_dpr", "te_prec_tp2_fr", "te_prec8_dp2_dpr",
        "te_fp8_tp2_fr", "te_fp8param_tp2_fr", "n_fp8p_dp2",
        "te_gdn_tp2_fr", "n_gdn_dp1", "te_gpt_pp2_fr",
    ),
    "te_experts": (
        "te_moe_ep2_dpr", "te_mla_ep2_fr", "n_mla_dp1", "n_moe_ep2", "v16_moe_ep2_fr", "v16n_moe_ep2",
    ),
    "user_cases": ("user_cases",),
    "vectors": ("vectors",),
}  # fmt: skip
_GROUP_OF = {name: group for group, names in GROUPS.items() for name in names}
_MADE = 1_767_225_600  # 2026-01-01: the time of every packed file
# What foretells a byte that is no repetition: its place in a float, or (JSON) the byte before it.
_LITERALS = ({"lc": 0, "lp": 2}, {"lc": 4, "lp": 0})


def unpacked(name: str) -> Path:
    """A packed folder by its name, to be read only: its group is unpacked once for all runs of tests."""
    return _unpacked_group(_GROUP_OF[name]) / name


@cache
def _unpacked_group(group: str) -> Path:
    archive = PACKED / f"{group}.tar.xz"
    place = UNPACKED / f"{group}-{zlib.crc32(archive.read_bytes()):08x}"
    UNPACKED.mkdir(parents=True, exist_ok=True)
    with (UNPACKED / f"{group}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # pytest-xdist's processes ask at the same time
        if not place.is_dir():
            with tempfile.TemporaryDirectory(dir=UNPACKED) as folder, tarfile.open(archive) as found:
                found.extractall(Path(folder) / "all", filter="data")
                (Path(folder) / "all").rename(place)
    return place


def packed(folders: Iterable[Path]) -> bytes:
    """A `.tar.xz` of folders: the same bytes for the same names and contents."""
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as archive:
        for folder in folders:
            archive.add(folder, folder.name, filter=_without_origin)
    common = {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 64 << 20}
    return min((lzma.compress(tar.getvalue(), filters=[common | told]) for told in _LITERALS), key=len)


def _without_origin(member: tarfile.TarInfo) -> tarfile.TarInfo:
    return member.replace(
        mtime=_MADE, mode=0o755 if member.isdir() else 0o644, uid=0, gid=0, uname="", gname="", deep=False
    )


def main() -> None:
    given = [Path(folder) for folder in sys.argv[1:]]
    for group, names in GROUPS.items():
        of = [
            next((folder / name for folder in given if (folder / name).is_dir()), None) or unpacked(name)
            for name in names
        ]
        data = packed(of)
        (PACKED / f"{group}.tar.xz").write_bytes(data)
        print(f"{group}: {len(data)} bytes", flush=True)


if __name__ == "__main__":
    main()
