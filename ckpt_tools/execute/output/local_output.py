"""A job's output in a directory of a mounted file system, which appears whole or not at all.

Everything is written under `<parent>/.<name>.ckpt_tools-partial/`::

    lock         held while a converter works here
    journal/     what is finished
    checkpoint/  the future directory; its `.metadata` comes last
    publishing   the inode number of `checkpoint/` and its plan, once it is complete
    replaced/    the old directory, where the file system cannot exchange two names at once

Rank 0 locks it, makes links and all other files in full length and writes what the plan holds itself (blobs). Every
rank writes its items, a run of neighbours, and notes each in its journal. Then rank 0 renames `checkpoint/` to
`<parent>/<name>`. A process killed before that leaves the old state and a hidden partial directory; the next one
cleans up or resumes from it. An error leaves the hidden directory if a run can resume from it (storage, signals,
defects), and removes it otherwise (damage, wrong masters).

The name of the partial directory can be guessed, so somebody may have put something there: a link to a directory, a
lock that is a link to a file. It is held open as a handle, belongs to this user alone (0700), and what is in it is
used or removed only if this tool made it (`folders`). Nothing that a link points to is ever touched.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import cached_property
from pathlib import Path

from ckpt_tools.errors import StorageError, UsageError
from ckpt_tools.execute.move.source_reader import SourceReader
from ckpt_tools.execute.output.access import Access, access_of, common_access, give_group, make_folder
from ckpt_tools.execute.output.checks import can_go_on, has_files, lengths, prove_shards, replaced
from ckpt_tools.execute.output.fileio import can_share, check_direct, preallocate, storage_errors, write_all
from ckpt_tools.execute.output.folders import (
    Folder,
    Foreign,
    Place,
    exchange,
    move,
    opened,
    temporary_name,
)
from ckpt_tools.execute.output.journal import Journal, check_unchanged_since_open, fingerprint
from ckpt_tools.execute.processes.threads import Work
from ckpt_tools.execute.write_job import METADATA, Done, Found, SourceState, WriteJob
from ckpt_tools.formats.locate.detect import PARTIAL_SUFFIX
from ckpt_tools.formats.storage.drivers import Part
from ckpt_tools.formats.storage.files import Files, LocalFiles
from ckpt_tools.formats.storage.joined_files import JoinedFiles, place_of
from ckpt_tools.human import human_bytes
from ckpt_tools.model.transfers import OutputItem
from ckpt_tools.plan.build import Hole, hole_bytes, holes, worker_share

LOCK, MARKER, DATA, REPLACED, JOURNAL = "lock", "publishing", "checkpoint", "replaced", "journal"
_OWN = re.compile(rf"{LOCK}|{MARKER}|{DATA}|{REPLACED}|{JOURNAL}|(spool|direct)-\w+|\.[0-9a-f]{{16}}\.tmp")
_MARKER_BYTES, _LOCK_BYTES = 1 << 12, 1 << 10
_LOCK_TRIES = 500


def _entries(folder: Path) -> dict[str, int | None]:
    """As `Store.sizes`; what is neither a file nor a link to one counts as a folder."""
    with storage_errors(folder):
        if folder.is_symlink():
            return {"": None}
        return {one.name: one.stat().st_size if one.is_file() else None for one in folder.iterdir()}


def _refuse_sources(final: Path, sources: Iterable[Path]) -> None:
    """Raise UsageError if a file of the sources lies in the output, perhaps by links, or the output in one."""
    target = Path(os.path.realpath(final))
    for source in sources:
        with storage_errors(source):
            linked = [path for path in source.iterdir() if path.is_symlink()]
        files = [Path(os.path.realpath(path)) for path in (source, *linked)]
        if target.is_relative_to(files[0]) or any(file.is_relative_to(target) for file in files):
            raise UsageError(
                f"{final} is not replaced: files of the source {source} lie in it, or it lies in the source. Choose "
                "another output."
            )


def output_blocked_error(folder: Path) -> UsageError:
    """The error for a directory that cannot be made, as something else has its name or a parent's."""
    return UsageError(
        f"{folder}: cannot create it: a file or a broken link with that name exists; choose another output"
    )


def check_own(folder: Folder) -> None:
    """Raise Foreign if somebody else has put something into a partial directory."""
    names = folder.names()
    if names and LOCK not in names:
        raise foreign_file_error(folder, names[0])
    for name in names:
        if not _OWN.fullmatch(name):
            raise foreign_file_error(folder, name)


def foreign_file_error(folder: Folder, name: str) -> Foreign:
    """What to say of a name in the partial directory that is not this tool's."""
    return Foreign(
        f"{folder.path} is where the output would be made, but it holds {name}, which this tool did not put there. "
        "Move it away, or choose another output."
    )


def lock_output(lock: int, final: Path, kind: int = fcntl.LOCK_EX) -> None:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(lock, 100, 0).decode(errors="replace")
        raise UsageError(f"{final} is being written by another converter ({owner})") from None


def allocated(data: Folder) -> int:
    """Bytes that the file system has set aside for the files of a directory."""
    return sum(status.st_blocks * 512 for name in data.names() if (status := data.status(name)))


def link_refused_error(name: str, folder: Path, error: OSError) -> StorageError:
    """What to say where `folder` gets no hard link to the file `name` of the source."""
    why = {
        errno.EXDEV: "they are on different file systems, mounts, filesets or quota projects",
        errno.EPERM: "this file system has no hard links, or Linux allows none to files of another user "
        "(fs.protected_hardlinks)",
        errno.EOPNOTSUPP: "this file system has no hard links",
        errno.EMLINK: "the file has as many links as the file system allows",
    }.get(error.errno or 0, error.strerror or str(error))
    return StorageError(f"{folder}: no hard link to {name}: {why}. Leave out --hard-link to copy the files.")


def _local_parts(files: Files) -> list[LocalFiles]:
    """The directories of a mounted file system that a source lies in."""
    parts = files.parts if isinstance(files, JoinedFiles) else (files,)
    return [part for part in parts if isinstance(part, LocalFiles)]


class LocalOutput:
    """See `JobOutput`."""

    token = ""  # the name of a file in the partial directory, which no other folder has

    def __init__(self, job: WriteJob) -> None:
        self._job, self._plan = job, job.plan
        self._overwrite, self._resume = job.output.overwrite, job.output.resume
        self.final = Path(job.output.directory)
        self.partial = self.final.parent / f".{self.final.name}{PARTIAL_SUFFIX}"
        self.scratch: Path | None = self.partial
        self.data = self.partial / DATA
        self.replaced: str | None = None
        self._sources = [Path(part.location) for part in _local_parts(job.files)]
        self._journal = Journal(self.partial / JOURNAL, self.folder)
        self._state: SourceState = []
        self._parent: Folder | None = None
        self._folder: Folder | None = None
        self._lock: int | None = None
        self._made: list[Path] = []  # directories above the output, the outermost first

    def draw_token(self) -> None:
        if self._job.ranks.world > 1:
            self.token = temporary_name()
            with storage_errors(self.partial):
                os.close(self.folder().open(self.token, os.O_WRONLY | os.O_CREAT, 0o600))

    def check_token(self) -> None:
        try:
            is_there = not self.token or self.folder().exists(self.token)
        except StorageError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            is_there = False
        if not is_there:
            raise UsageError(
                f"the ranks do not see one output folder: {self.partial} is another one here than on rank 0. "
                "Choose an output on a file system that all nodes share."
            )

    @cached_property
    def _access(self) -> Access:
        """Who may do what with the output; it looks at many files, so only the rank that makes the output asks."""
        access = common_access(access_of(source) for source in self._sources)
        if self.final.is_dir() and not self.final.is_symlink():
            return access_of(self.final).within(access)
        return access

    @cached_property
    def _holes(self) -> Mapping[str, list[Hole]]:
        """What is not set aside; file systems are asked, so only the rank that makes the output asks."""
        answers: dict[Files, bool] = {}

        def shares(file: str) -> bool:
            files, name = place_of(self._job.files, file)
            if files not in answers and isinstance(files, LocalFiles):
                with files.descriptor(name) as fd:
                    answers[files] = can_share(fd, self._above)
            return answers.get(files, False)

        return holes(self._plan, shares)

    @property
    def _nbytes(self) -> int:
        """That must be free."""
        return self._plan.bytes_to_write - hole_bytes(self._holes)

    @property
    def _above(self) -> Path:
        """The output's parent, or what is there of the way to it."""
        return next(f for f in (self.final.parent, *self.final.parent.parents) if os.path.lexists(f))

    @property
    def _place(self) -> Place:
        return Place(self.parent(), self.final.name)

    def parent(self) -> Folder:
        if self._parent is None:
            with storage_errors(self.final.parent):
                self._parent = Folder.named(self.final.parent)
        return self._parent

    def folder(self) -> Folder:
        """The partial directory; other ranks than the one that made it only enter it."""
        if self._folder is None:
            with storage_errors(self.partial):
                self._folder = self.parent().enter(self.partial.name)
        return self._folder

    def open_data(self) -> Folder:
        """The future directory; the caller closes it."""
        with storage_errors(self.data):
            return self.folder().enter(DATA)

    def look(self) -> bool:
        self._check_beside()
        if self._resume and self._has_files():
            return True
        above = self._above
        if not above.is_dir():
            raise output_blocked_error(self.final.parent)
        try:
            with storage_errors(above), Folder.named(above) as folder:
                present = self._look_inside() if above == self.final.parent else 0
                if not os.access(above, os.W_OK | os.X_OK):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
                made = (*self.final.parent.relative_to(above).parts, self.partial.name)
                if any(len(os.fsencode(name)) > os.pathconf(above, "PC_NAME_MAX") for name in made):
                    raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
                self._check_space(folder, self._nbytes - present)
                self._check_one_file_system(folder)
        finally:
            self.close()
        if self._job.options.direct:
            check_direct(above)
        return False

    def _look_inside(self) -> int:
        """`look` at what lies in the output's parent; bytes that a stopped conversion has set aside for this one."""
        moved, parent = None, self.parent()
        if parent.exists(self.partial.name):
            folder = self.folder()
            check_own(folder)
            if folder.exists(LOCK):
                with os.fdopen(folder.open(LOCK, os.O_RDONLY), "rb") as lock:
                    lock_output(lock.fileno(), self.final, fcntl.LOCK_SH)
            if folder.exists(REPLACED) and not parent.exists(self.final.name):
                moved = self.partial / REPLACED
        self._state = fingerprint(self._job.files, self._plan)
        if self._examine(moved) == "nothing":
            return 0
        with self.open_data() as data:
            return allocated(data)

    def _check_beside(self) -> None:
        """Raise UsageError if a directory has the name of a tracker."""
        for name in self._job.output.beside:
            path = self.final.parent / name
            if path.is_dir() and not path.is_symlink():
                raise UsageError(
                    f"{path} is a directory, where the tracker file goes; move it away, or choose another output"
                )

    def _examine(self, moved: Path | None = None) -> Found:
        """Whether there is unfinished work to go on from; raise UsageError if something is in the way.

        `moved` is where a process that was killed while replacing the old directory has left that.
        """
        has_work = self.parent().exists(self.partial.name) and self._journal.exists()
        if has_work and self._resume:
            self._journal.resume(self._plan, self._state, self._job.files.location)
        elif has_work and not self._overwrite:
            raise UsageError(
                f"{self.partial} holds a conversion that was stopped. Continue it with --resume, or start again "
                "with --overwrite."
            )
        self._check_final(moved)
        return "unfinished" if has_work and self._resume and self._has_own_data() else "nothing"

    def _check_final(self, moved: Path | None = None) -> None:
        """Raise UsageError unless the output is absent, empty or may be replaced."""
        final = self.final
        status = self.parent().status(final.name) if moved is None else os.lstat(moved)
        if status is None:
            return
        if not stat.S_ISDIR(status.st_mode):
            raise UsageError(f"{final} exists and is not a directory; choose another output")
        if final.is_mount():
            raise UsageError(
                f"{final} is a mount point, which cannot be replaced; choose a directory inside it"
            )
        old = moved or final
        if not any(old.iterdir()):
            return
        if not self._overwrite:
            raise UsageError(f"{final} is not empty; choose another output or replace it with --overwrite")
        _refuse_sources(final, self._sources)
        written = {*self._plan.file_bytes, *self._plan.links, *self._job.output.extra_files}
        self.replaced = replaced(str(final), lambda name: _entries(old / name), written)

    def take(self, state: SourceState) -> Found:
        self._state = state
        try:
            with storage_errors(self.partial):
                self._make_parent()
                self._check_beside()
                self._take_lock()
                self._undo_half_replacement()
                if self._resume and self._is_published():
                    return "published"
                if self._resume and self._has_files() and not self._journal.exists():
                    return "finished"
                found = self._make_room()
        except BaseException:
            if self._lock is not None and self.folder().names() == [LOCK]:
                self.finish()  # nothing but what this process put there
            self.close()
            self._unmake_parents()
            raise
        self._make_files(found)
        return found

    def keep(self) -> None:
        """It is in place, and locked."""

    def begin(self) -> Found:
        found = self._make_room()
        self._make_files(found)
        return found

    def _make_parent(self) -> None:
        missing = []
        for folder in (self.final.parent, *self.final.parent.parents):
            if folder.is_dir():
                break
            missing.append(folder)
        try:
            for folder in reversed(missing):
                with Folder.named(folder.parent) as above, suppress(FileExistsError):
                    make_folder(above, folder.name, self._access).close()
                    self._made.append(folder)
            self.parent()
        except (Foreign, StorageError, FileExistsError, NotADirectoryError):
            if self.final.parent.is_dir():
                raise
            raise output_blocked_error(self.final.parent) from None

    def _make_room(self) -> Found:
        """Clear the partial directory unless there is work in it to go on from."""
        found = self._examine()
        if found == "nothing":
            folder = self.folder()
            folder.remove(MARKER)  # before the rest: it must not vouch for what is written next
            if folder.names() != [LOCK]:
                with ExitStack() as stack:
                    for part in _local_parts(self._job.files):
                        stack.enter_context(part.links_change(part.opened))
                    self._clear()  # perhaps links to the source
                self._state[:] = fingerprint(self._job.files, self._plan)
            make_folder(folder, DATA, self._access).close()
        return found

    def _has_own_data(self) -> bool:
        """Whether `checkpoint/` is there and is not what an exchange left in its place."""
        status = self.folder().status(DATA)
        if status is None:
            return False
        marker = self._read_marker()
        return marker is None or marker == self._mark(status)

    def _mark(self, folder: os.stat_result) -> bytes:
        return f"{folder.st_ino} {self._plan.digest}".encode()

    def _read_marker(self) -> bytes | None:
        try:
            return self.folder().read(MARKER, _MARKER_BYTES)
        except FileNotFoundError:
            return None

    def _is_published(self) -> bool:
        """Whether an earlier process was stopped after it had put the output in place."""
        marker, final = self._read_marker(), self.parent().status(self.final.name)
        if marker is None or final is None or marker != self._mark(final):
            return False
        sizes = {**self._plan.file_bytes, **self._plan.links}
        with self.parent().enter(self.final.name) as folder:  # inode numbers are used again: the sizes tell
            found = {name: folder.status(name) for name in sizes}
        return all(s is not None and s.st_size == sizes[name] for name, s in found.items())

    def _has_files(self) -> bool:
        """Whether the output has all files of the plan in full length, and as links those that are to be links."""
        plan = self._plan
        return has_files({**plan.file_bytes, **plan.links}, lengths(self.final)) and all(
            (self.final / name).samefile(Path(self._job.files.location, name)) for name in plan.links
        )

    def _take_lock(self) -> None:
        """Lock the partial directory, which a finishing converter may be removing right now."""
        while self._lock is None:
            fd = self._open_lock()
            if fd is None:
                continue
            try:
                try:
                    lock_output(fd, self.final)
                except OSError as error:
                    if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
                        raise  # these three: a file system without locks, where only the name guards the output
                if self._is_there(fd):
                    os.ftruncate(fd, 0)
                    os.pwrite(fd, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)
                    self._lock = fd
            finally:
                if self._lock is None:
                    os.close(fd)

    def _open_lock(self) -> int | None:
        """The lock file of the partial directory, both made if need be; None when it went away meanwhile."""
        self._forget_folder()
        with suppress(FileExistsError):
            self.parent().make(self.partial.name, 0o700).close()
        try:
            folder = self.folder()
            with suppress(OSError):  # some file systems keep no permissions
                os.fchmod(folder.fd, stat.S_IMODE(os.fstat(folder.fd).st_mode) & ~0o077)
            check_own(folder)
            fd = folder.open(LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except (FileNotFoundError, StorageError) as error:
            if isinstance(error.__cause__ or error, FileNotFoundError):
                return None
            raise
        written = os.pread(fd, _LOCK_BYTES, 0)
        if written and not written.startswith(b"process "):
            os.close(fd)
            raise foreign_file_error(folder, LOCK)
        return fd

    def _is_there(self, lock: int) -> bool:
        """Whether the lock is still the one in the directory, and the directory the one in its parent."""
        places = [
            (lock, self.folder().status(LOCK)),
            (self.folder().fd, self.parent().status(self.partial.name)),
        ]
        return all(status is not None and os.path.samestat(os.fstat(fd), status) for fd, status in places)

    def _undo_half_replacement(self) -> None:
        """Put the old directory back if a process was killed between the two renames of `publish`."""
        old = self.folder().status(REPLACED)
        if old and stat.S_ISDIR(old.st_mode) and not self.parent().exists(self.final.name):
            move(Place(self.folder(), REPLACED), self._place)

    def _clear(self) -> None:
        for name in self.folder().names():
            if name not in (LOCK, MARKER):
                self.folder().remove(name)

    def _make_files(self, found: Found) -> None:
        """All files in full length, with the blobs in them, and a journal."""
        if self._job.options.direct:
            check_direct(self.partial)
        self.create_files()
        if found == "nothing":
            self._journal.begin(self._plan, self._state)
        with self.open_data() as folder:
            for name in dict.fromkeys(blob.file for blob in self._plan.blobs):
                with opened(folder, name, os.O_RDWR) as fd, storage_errors(folder.path / name):
                    shared = {blob.offset: blob.data for blob in self._plan.blobs if blob.file == name}
                    for offset, data in shared.items():
                        write_all(fd, data, offset)
                    if self._job.options.fsync:
                        os.fsync(fd)

    def create_files(self) -> None:
        """Make the data files in their full length; those that exist keep their content."""
        with self.open_data() as data:
            with storage_errors(self.data):
                present = allocated(data)
            self._check_space(self.folder(), self._nbytes - present)
            self._link(data)
            for name, size in self._plan.file_bytes.items():
                with storage_errors(self.data / name):
                    fd = data.open(name, os.O_RDWR | os.O_CREAT, self._access.file)
                    try:
                        self._give_to_group(fd, data)
                        preallocate(fd, size, self._holes.get(name, ()))
                    finally:
                        os.close(fd)

    def _link(self, data: Folder) -> None:
        """Give the source's files that the plan keeps names in `data`."""
        files = self._job.files
        for name in self._plan.links:
            assert isinstance(files, LocalFiles)  # or there were no links
            with files.descriptor(name) as fd, storage_errors(data.path / name):
                if self._job.options.fsync:
                    os.fsync(fd)
                there = data.status(name)  # a link of an earlier process, perhaps to another file
                if there and os.path.samestat(there, os.fstat(fd)):
                    continue
                data.remove(name)
                try:  # by the open file: its name may lead to another by now
                    with files.links_change([name]):
                        os.link(f"/proc/self/fd/{fd}", name, dst_dir_fd=data.fd, follow_symlinks=True)
                except OSError as error:
                    check_unchanged_since_open(files)  # what lost its last name gets no other
                    raise link_refused_error(name, self.final, error) from error

    def _check_one_file_system(self, at: Folder) -> None:
        """Raise StorageError if the files to be linked are not on the file system of `at`."""
        for name in self._plan.links:
            above = Path(os.path.realpath(Path(self._job.files.location, name))).parent
            with storage_errors(above):
                if above.stat().st_dev != os.fstat(at.fd).st_dev:
                    raise link_refused_error(name, self.final, OSError(errno.EXDEV, ""))

    def _check_space(self, at: Folder, nbytes: int) -> None:
        """Raise StorageError if the file system of `at` has less than `nbytes` free."""
        with storage_errors(at.path):
            status = os.statvfs(at.fd)
        free = status.f_bavail * status.f_frsize
        if free < nbytes:
            raise StorageError(
                f"{self.final.parent} has {human_bytes(free)} free, but {self.final.name} needs "
                f"{human_bytes(nbytes)}. Free some space, or choose another output."
            )

    def _give_to_group(self, fd: int, folder: Folder) -> None:
        """A file's group is its directory's, as far as the access of the output says so."""
        if self._access.group is not None:
            give_group(fd, os.fstat(folder.fd).st_gid)

    def share(self) -> Sequence[OutputItem]:
        numbers = self._numbers()
        return self._plan.items[numbers.start : numbers.stop]

    def _numbers(self) -> range:
        return worker_share(self._plan.items, self._job.ranks.rank, self._job.ranks.world)

    def open_files(self) -> Mapping[str, str | None]:
        return {}

    def work(self, source: SourceReader, opened: Mapping[str, str | None]) -> Done:
        job, journal = self._job, self._journal
        finished = journal.finished()
        journal.open(job.ranks.rank)
        with closing(journal), self.open_data() as folder:
            linked = worker_share(self._plan.linked, job.ranks.rank, job.ranks.world)
            for item in self._plan.linked[linked.start : linked.stop]:
                source.note(item.transfers)
            work = Work(job, self._numbers(), source, folder, journal)
            counters = work.run(finished)
        return Done(counters, work.resumed)

    def publish(
        self, metadata: bytes | None, versions: Mapping[str, str | None], parts: Mapping[str, Sequence[Part]]
    ) -> None:
        prove_shards(self._plan, self.data)
        for name, content in self._job.output.extra_files.items():
            self._write_file(name, content)
        if metadata is not None:
            self._write_file(METADATA, metadata)
        self.put_in_place()

    def _write_file(self, name: str, content: bytes) -> None:
        """A small file of the future directory, or of a folder in it."""
        inside, _, name = name.rpartition("/")
        sync = self._job.options.fsync
        with ExitStack() as stack:
            stack.enter_context(storage_errors(self.data / inside / name))
            folder = stack.enter_context(self.open_data())
            if inside:
                with suppress(FileExistsError):
                    make_folder(folder, inside, self._access).close()
                folder = stack.enter_context(folder.enter(inside))
            fd = folder.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, self._access.file)
            with os.fdopen(fd, "wb") as file:
                self._give_to_group(fd, folder)
                file.write(content)
                if sync:
                    file.flush()
                    os.fsync(fd)
            if sync and inside:
                folder.sync()

    def put_in_place(self) -> None:
        """Rename the finished directory into place. `finish` then removes what it replaced."""
        folder, sync = self.folder(), self._job.options.fsync
        data, final = Place(folder, DATA), self._place
        if self._overwrite:
            self._check_final()
        with storage_errors(self.final):
            with self.open_data() as finished:
                if sync:
                    finished.sync()
                folder.write(MARKER, self._mark(os.fstat(finished.fd)))
            if not (self._overwrite and self.parent().exists(self.final.name)):
                move(data, final)  # refused unless it is absent or empty
            elif not exchange(data, final):
                move(final, Place(folder, REPLACED))
                move(data, final)
            if sync:
                self.parent().sync()

    @contextmanager
    def trackers_locked(self) -> Iterator[None]:
        fd = self.parent().fd
        with suppress(OSError):  # NFS locks no directories
            for _ in range(_LOCK_TRIES):  # and who has called this command may hold it for all its time
                with suppress(BlockingIOError):
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                time.sleep(0.01)
        try:
            yield
        finally:
            with suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)

    def has_beside(self, name: str) -> bool:
        return self.parent().exists(name)

    def write_beside(self, name: str, content: bytes) -> None:
        """A reader sees the old or the new content, never a part."""
        folder, parent = self.folder(), self.parent()
        with storage_errors(parent.path / name):
            old = parent.status(name)
            is_file = old is not None and stat.S_ISREG(old.st_mode)
            temporary = temporary_name()
            folder.write(
                temporary, content, True, old.st_mode & 0o777 if old and is_file else self._access.file
            )
            above = os.fstat(parent.fd)
            if old and is_file:
                group: int | None = old.st_gid
            else:  # a directory with setgid hands down its own
                group = above.st_gid if above.st_mode & stat.S_ISGID else self._access.group
            if group is not None:
                fd = folder.open(temporary, os.O_RDONLY)
                try:
                    give_group(fd, group)
                finally:
                    os.close(fd)
            os.replace(temporary, name, src_dir_fd=folder.fd, dst_dir_fd=parent.fd)
            parent.sync()

    def finish(self) -> None:
        """Remove the partial directory and everything in it; the marker last, as it says that all is well."""
        with storage_errors(self.partial):
            self._clear()
            self.folder().remove(MARKER)
            self.folder().remove(LOCK)
            status = self.parent().status(self.partial.name)
            if status is not None and os.path.samestat(os.fstat(self.folder().fd), status):
                with suppress(OSError):  # another converter may have started here
                    os.rmdir(self.partial.name, dir_fd=self.parent().fd)
        self.close()
        self._unmake_parents()

    def _unmake_parents(self) -> None:
        """Remove what was made above an output that is not there; what has something in it stays."""
        with suppress(OSError):
            while self._made:
                self._made.pop().rmdir()

    def leave(self, error: BaseException) -> None:
        if self._lock is None:
            return
        if can_go_on(error) and self._journal.exists():
            self.close()
        else:
            self.finish()

    def close(self) -> None:
        """Let others take the output; what is in the partial directory stays."""
        if self._lock is not None:
            with suppress(OSError):
                os.close(self._lock)
            self._lock = None
        self._forget_folder()
        if self._parent is not None:
            self._parent.close()
            self._parent = None

    def _forget_folder(self) -> None:
        if self._folder is not None:
            self._folder.close()
            self._folder = None
