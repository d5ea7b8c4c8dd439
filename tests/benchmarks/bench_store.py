"""Object stores: the tool against a plain parallel client of the same store, with as many requests of the same sizes.

    python -m tests.benchmarks.bench_store FOLDER [--gib 2] [--runs 5] [--only NAME ...]

The store is `store_server` on loopback. The plain client is boto3 by 16 threads of one process: ranged reads and
uploaded parts of 8 MiB; it looks at nothing that it moves. The tool's rows are run with as many processes as it takes
by default, and with one. Rows are run in turn, the first round is thrown away: wall and CPU seconds of all processes,
the largest RssAnon of them together and of one, the requests that the store has answered and the bytes that left and
reached it. By hand, not by CI.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from tests.benchmarks.store_server import COUNTS, store_environment
from tests.benchmarks.timing import TOOL, Taken, taken
from tests.ports import free_port

REQUESTS, RANGE, PART = 16, 8 << 20, 8 << 20
BUCKET = "bench"
HERE = (sys.executable, "-m", "tests.benchmarks.bench_store")


def client() -> Any:
    """A client that 16 threads share."""
    import boto3
    from botocore.config import Config

    return boto3.client("s3", config=Config(max_pool_connections=REQUESTS))


def ranges(s3: Any, prefix: str) -> list[tuple[str, int, int]]:
    """Every object below a prefix in parts of 8 MiB: key, first byte, byte after the last."""
    listed = s3.list_objects_v2(Bucket=BUCKET, Prefix=f"{prefix}/")["Contents"]
    return [
        (one["Key"], at, min(at + RANGE, one["Size"]))
        for one in listed
        for at in range(0, one["Size"], RANGE)
    ]


def plain_read(prefix: str) -> None:
    """Read everything below a prefix and drop it."""
    s3 = client()

    def read(part: tuple[str, int, int]) -> int:
        key, start, stop = part
        return len(s3.get_object(Bucket=BUCKET, Key=key, Range=f"bytes={start}-{stop - 1}")["Body"].read())

    with ThreadPoolExecutor(REQUESTS) as pool:
        print(sum(pool.map(read, ranges(s3, prefix))))


def parts_of(s3: Any, folder: Path, prefix: str) -> Iterator[tuple[str, str, int, Path, int]]:
    """Begin an upload of every file: key, its id, the part's number, the file, the part's first byte."""
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        key = f"{prefix}/{path.relative_to(folder)}"
        upload = s3.create_multipart_upload(Bucket=BUCKET, Key=key)["UploadId"]
        for number, at in enumerate(range(0, max(path.stat().st_size, 1), PART), 1):
            yield key, upload, number, path, at


def plain_write(folder: str, prefix: str) -> None:
    """Upload all files of a folder below a prefix."""
    s3 = client()

    def write(part: tuple[str, str, int, Path, int]) -> tuple[tuple[str, str], dict[str, Any]]:
        key, upload, number, path, at = part
        with path.open("rb") as file:
            file.seek(at)
            data = file.read(PART)
        etag = s3.upload_part(Bucket=BUCKET, Key=key, UploadId=upload, PartNumber=number, Body=data)["ETag"]
        return (key, upload), {"PartNumber": number, "ETag": etag}

    with ThreadPoolExecutor(REQUESTS) as pool:
        finish(s3, pool.map(write, list(parts_of(s3, Path(folder), prefix))))


def finish(s3: Any, written: Any) -> None:
    """Complete every upload."""
    uploads: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for where, part in written:
        uploads.setdefault(where, []).append(part)
    for (key, upload), parts in uploads.items():
        s3.complete_multipart_upload(
            Bucket=BUCKET, Key=key, UploadId=upload, MultipartUpload={"Parts": parts}
        )


def plain_copy(source: str, prefix: str) -> None:
    """Read everything below a prefix and write it below another: 16 threads, each reads a part and uploads it."""
    s3 = client()
    listed = s3.list_objects_v2(Bucket=BUCKET, Prefix=f"{source}/")["Contents"]
    todo = []
    for one in listed:
        key = f"{prefix}/{one['Key'].rpartition('/')[2]}"
        upload = s3.create_multipart_upload(Bucket=BUCKET, Key=key)["UploadId"]
        starts = enumerate(range(0, one["Size"], PART), 1)
        todo += [(one["Key"], key, upload, number, at, min(at + PART, one["Size"])) for number, at in starts]

    def copy(part: tuple[str, str, str, int, int, int]) -> tuple[tuple[str, str], dict[str, Any]]:
        origin, key, upload, number, at, stop = part
        halves = (
            s3.get_object(Bucket=BUCKET, Key=origin, Range=f"bytes={start}-{min(start + RANGE, stop) - 1}")
            for start in range(at, stop, RANGE)
        )
        data = b"".join(half["Body"].read() for half in halves)
        etag = s3.upload_part(Bucket=BUCKET, Key=key, UploadId=upload, PartNumber=number, Body=data)["ETag"]
        return (key, upload), {"PartNumber": number, "ETag": etag}

    with ThreadPoolExecutor(REQUESTS) as pool:
        finish(s3, pool.map(copy, todo))


PLAIN: dict[str, Callable[..., None]] = {"read": plain_read, "write": plain_write, "copy": plain_copy}


def commands(folder: Path) -> dict[str, tuple[str, ...]]:
    """What is measured, by name; `out` is emptied before each."""
    place, source, fsdp = (
        f"s3://{BUCKET}",
        folder / "source/iter_0000100",
        folder / "store" / BUCKET / "fsdp/iter_0000100",
    )
    quiet = ("-q", "--json")
    rows = {
        "read, plain": (*HERE, "--plain", "read", "fsdp/iter_0000100"),
        "read, `verify --content`": (*TOOL, "verify", f"{place}/fsdp", "--content"),
        "write, plain": (*HERE, "--plain", "write", str(fsdp), "out"),
        "write, `convert LOCAL S3`": (*TOOL, "convert", str(source), f"{place}/out", *quiet),
        "both, plain": (*HERE, "--plain", "copy", "source/iter_0000100", "out"),
        "both, `convert S3 S3`": (*TOOL, "convert", f"{place}/source/iter_0000100", f"{place}/out", *quiet),
        "read, `convert S3 LOCAL`": (*TOOL, "convert", f"{place}/source", str(folder / "out"), *quiet),
    }
    alone = {f"{k}, one process": (*v, "--workers", "1") for k, v in rows.items() if "plain" not in k}
    return rows | alone


class Moved(NamedTuple):
    """What a command took, and what the store had of it."""

    taken: Taken
    requests: int
    out: int  # bytes that left the store
    came: int  # and reached it


def counted(environment: dict[str, str]) -> dict[str, int]:
    """Requests by kind and bytes, since this was asked last."""
    with urllib.request.urlopen(environment["AWS_ENDPOINT_URL"] + COUNTS) as answer:
        found: dict[str, int] = json.load(answer)
        return found


def timed(command: tuple[str, ...], environment: dict[str, str]) -> Moved:
    """Run a command."""
    counted(environment)
    found = taken(command, environment)
    counts = counted(environment)
    out, came = counts.pop("bytes out"), counts.pop("bytes in")
    return Moved(found, sum(counts.values()), out, came)


def prepare(folder: Path, gib: float) -> None:
    """Source and conversion, as files and as objects."""
    shutil.rmtree(folder, ignore_errors=True)
    objects = folder / "store" / BUCKET
    objects.mkdir(parents=True)
    (folder / "store/.uploads").mkdir()
    subprocess.run(
        [sys.executable, "-m", "tests.synthetic", str(objects / "source"), "--gib", str(gib)], check=True
    )
    (folder / "source").symlink_to(objects / "source")
    subprocess.run(
        [*TOOL, "convert", str(objects / "source"), str(objects / "fsdp"), "-q"],
        check=True,
        stdout=subprocess.DEVNULL,
    )


def measure(folder: Path, given: argparse.Namespace, environment: dict[str, str]) -> dict[str, list[Moved]]:
    rows = {k: v for k, v in commands(folder).items() if not given.only or k in given.only}
    found: dict[str, list[Moved]] = {name: [] for name in rows}
    for turn in range(given.runs + 1):
        for name, command in rows.items():
            for out in (folder / "out", folder / "store" / BUCKET / "out"):
                shutil.rmtree(out, ignore_errors=True)
            one = timed(command, environment)
            print(f"round {turn}: {name} {one.taken.wall:.2f} s", file=sys.stderr, flush=True)
            if turn:
                found[name].append(one)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--gib", type=float, default=2)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--plain", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.plain:
        PLAIN[given.plain[0]](*given.plain[1:])
        return
    folder, port = given.folder / "bench_store", free_port()
    prepare(folder, given.gib)
    environment = os.environ | store_environment(port)
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.benchmarks.store_server", str(folder / "store"), "--port", str(port)]
    )
    time.sleep(1)
    try:
        found = measure(folder, given, environment)
    finally:
        server.kill()
        server.wait()
        shutil.rmtree(folder)
    print(f"{given.gib} GiB, {len(os.sched_getaffinity(0))} cores, {given.runs} runs")
    for name, row in found.items():
        takes = [one.taken for one in row]
        walls = [one.wall for one in takes]
        print(
            f"{name:40} {statistics.median(walls):6.2f} s ({min(walls):.2f}-{max(walls):.2f}), "
            f"{statistics.median(one.cpu for one in takes):6.2f} CPU s, RssAnon "
            f"{max(one.together for one in takes) >> 20} MiB (one {max(one.largest for one in takes) >> 20}), "
            f"{row[0].requests} requests, "
            f"{row[0].out / 1e6:.0f} MB out, {row[0].came / 1e6:.0f} MB in"
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
