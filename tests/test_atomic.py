"""Writing: whole or not at all, by one process, never over finished work; states belong to one run."""

import errno
import os
import resource
import signal
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from helpers.errors import raises_option
from safetensors import SafetensorError

from draftlab import cli
from draftlab.commands.settings.report import ReportConfig
from draftlab.errors import Interrupted, UserError
from draftlab.output import Output
from draftlab.runs import atomic


def in_child(work) -> int:
    """Run work in a forked process and return how it ended."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except UserError:
            os._exit(1)
        except BaseException:
            os._exit(2)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def limited(size: int, *, deadly: bool) -> None:
    """Let no file grow beyond size bytes: a write beyond it kills, or fails as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL if deadly else signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def hidden(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob(".*"))


@pytest.mark.parametrize("deadly", [True, False])
def test_a_file_is_the_old_or_the_new_one_and_nothing_is_left(tmp_path, deadly):
    file = tmp_path / "file.json"
    atomic.write_atomic(file, "old")

    def torn():
        limited(10, deadly=deadly)
        atomic.write_atomic(file, "n" * 1000)

    assert in_child(torn) in (-signal.SIGXFSZ, 2)
    assert file.read_text() == "old"
    with atomic.locked(tmp_path):
        atomic.write_atomic(file, "new")
    assert file.read_text() == "new"
    assert hidden(tmp_path) == []


def test_a_kill_between_the_two_renames_of_force_loses_nothing(tmp_path, monkeypatch):
    out = tmp_path / "out"
    with atomic.new_directory(out, force=False) as work:
        (work / "kept").write_text("old")

    def killed():
        rename = Path.rename

        def stop(self, target):
            if target == out:
                os._exit(9)
            return rename(self, target)

        monkeypatch.setattr(Path, "rename", stop)
        with atomic.new_directory(out, force=True) as work:
            (work / "kept").write_text("new")

    assert in_child(killed) == 9
    assert not out.exists()
    with atomic.locked(out):
        pass
    assert (out / "kept").read_text() == "new"
    assert hidden(tmp_path) == []


@pytest.mark.parametrize("force", [False, True])
def test_what_is_finished_stays_whole_if_its_place_was_taken(tmp_path, force):
    """A file came to the place meanwhile, or with force the old output cannot make room."""
    out, renamed = tmp_path / "out", []
    if force:
        with atomic.new_directory(out, force=False) as work:
            (work / "kept").write_text("old")

    def write():
        with atomic.new_directory(out, force=force) as work:
            (work / "result").write_text("new")
            renamed.append(work)
            if force:
                (work.parent / atomic.REPLACED / "other").mkdir(parents=True)
            else:
                out.write_text("a file")

    with pytest.raises(UserError) as error:
        write()
    assert str(renamed[0]) in str(error.value)
    with atomic.locked(out):  # as a repeat of the command does
        pass
    assert (renamed[0] / "result").read_text() == "new"
    assert (out / "kept").read_text() == "old" if force else out.read_text() == "a file"


@pytest.mark.parametrize("there", ["empty", "full", "missing"])
def test_an_output_is_written_where_a_link_leads(tmp_path, there):
    disk, out = tmp_path / "disk" / "out", tmp_path / "out"
    disk.parent.mkdir()
    if there != "missing":
        disk.mkdir()
    if there == "full":
        (disk / "old").touch()
    out.symlink_to(disk)
    with atomic.locked(out), atomic.new_directory(out, force=there == "full") as work:
        (work / "new").touch()
    assert out.is_symlink()
    assert [file.name for file in disk.iterdir()] == ["new"]
    assert hidden(tmp_path) == hidden(disk.parent) == []


def test_a_link_without_end_is_one_line(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(UserError, match=str(tmp_path / "a")):
        atomic.check_free(tmp_path / "a", force=False)


def test_names_of_the_user_are_nobodys_temporary_names(tmp_path):
    """Neither folders beside an output, nor links at the names of temporary files."""
    mine = [".out.new", ".out.old", ".out.abcdefgh.draftlab", ".out.state"]
    for name in mine:
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis").touch()
    (tmp_path / "victim").write_text("precious")
    for name in (".file.new", ".file.draftlab"):
        (tmp_path / name).symlink_to("victim")
    with atomic.locked(tmp_path / "out"), atomic.new_directory(tmp_path / "out", force=True):
        pass
    atomic.write_atomic(tmp_path / "file", "text")
    for force in (False, True):
        with pytest.raises(UserError):
            atomic.claim_state(tmp_path / ".out.state", {}, force=force)
    assert all((tmp_path / name / "thesis").exists() for name in mine)
    assert (tmp_path / "victim").read_text() == "precious"


def test_a_failed_replacement_keeps_the_old_and_a_good_one_replaces_it(tmp_path):
    out = tmp_path / "out"
    for name in ("a", "b", "failing"):
        expected = pytest.raises(ZeroDivisionError) if name == "failing" else nullcontext()
        with expected, atomic.new_directory(out, force=name != "a") as work:
            (work / name).write_text("x")
            assert name != "failing" or 1 / 0
    assert list(tmp_path.rglob("*")) == [out, out / "b"]
    with raises_option("--force"):
        atomic.check_free(out, force=False)


def test_of_two_writers_the_slower_one_loses(tmp_path):
    out = tmp_path / "out"

    def write(text: str, meanwhile=lambda: None):
        with atomic.new_directory(out, force=False) as work:
            (work / "file").write_text(text)
            meanwhile()

    with pytest.raises(UserError, match=str(out)):
        write("slow", lambda: write("fast"))
    assert (out / "file").read_text() == "fast"
    assert [file.read_text() for file in tmp_path.glob(".*/out/file")] == ["slow"]


def test_an_output_is_made_by_one_process_at_a_time(tmp_path):
    out = tmp_path / "runs" / "out"

    def other():
        with atomic.locked(out):
            pass

    with atomic.locked(out):
        assert in_child(other) == 1
        with raises_option("--out"):
            other()
    assert in_child(other) == 0
    assert hidden(out.parent) == []


def test_a_killed_owner_blocks_nobody(tmp_path):
    def killed():
        with atomic.locked(tmp_path / "out"), atomic.new_directory(tmp_path / "out", force=False):
            os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(killed) == -signal.SIGKILL
    assert len(hidden(tmp_path)) == 2
    with atomic.locked(tmp_path / "out"):
        assert hidden(tmp_path) == [".out.lock"]
    assert hidden(tmp_path) == []


def test_a_log_has_whole_lines_only(tmp_path):
    log = tmp_path / "log.jsonl"
    atomic.append_line(log, '{"step": 1}')

    def full():
        limited(20, deadly=False)
        atomic.append_line(log, '{"step": 2}')

    assert in_child(full) == 1  # as a kill, it leaves half a line
    assert log.read_text() == '{"step": 1}\n{"step":'
    atomic.append_line(log, '{"step": 2}')
    assert log.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_files_have_the_modes_of_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        with atomic.new_directory(tmp_path / "out", force=False) as work:
            os.close(os.open(work / "weights", os.O_CREAT | os.O_WRONLY, 0o600))
        atomic.write_atomic(tmp_path / "file", "text")
    finally:
        os.umask(before)
    modes = [
        oct(path.stat().st_mode & 0o777) for path in (tmp_path / "out", tmp_path / "out/weights", tmp_path / "file")
    ]
    assert modes == ["0o750", "0o640", "0o640"]


def test_a_state_belongs_to_one_run(tmp_path):
    state = tmp_path / ".out.state"
    atomic.claim_state(state, {"lr": 1.0})
    atomic.claim_state(state, {"lr": 2.0})  # nothing was done yet
    (state / "work").write_text("half")
    atomic.claim_state(state, {"lr": 2.0})
    assert (state / "work").exists()
    with pytest.raises(UserError):
        atomic.claim_state(state, {"lr": 1.0})
    atomic.claim_state(state, {"lr": 1.0}, force=True)
    assert not (state / "work").exists()


def test_a_state_is_not_written_through_a_link(tmp_path):
    (tmp_path / "victim").mkdir()
    (tmp_path / ".out.state").symlink_to("victim")
    for force in (False, True):
        with raises_option(tmp_path / ".out.state"):
            atomic.claim_state(tmp_path / ".out.state", {}, force=force)
    assert not list((tmp_path / "victim").iterdir())


def test_a_claim_without_work_is_removed_with_the_lock(tmp_path):
    with atomic.locked(tmp_path / "out"):
        atomic.claim_state(tmp_path / ".out.state", {"lr": 1.0})
    assert hidden(tmp_path) == []


def test_a_state_without_a_readable_claim_is_not_resumed(tmp_path):
    state = tmp_path / ".out.state"
    atomic.claim_state(state, {"lr": 1.0})
    (state / "step-1").mkdir()
    (state / atomic.STATE_RECORD).write_text('{"lr": 1')
    with raises_option("--force"):
        atomic.claim_state(state, {"lr": 1.0})
    atomic.claim_state(state, {"lr": 1.0}, force=True)
    assert [path.name for path in state.iterdir()] == [atomic.STATE_RECORD]


def test_a_claim_whose_writing_was_killed_belongs_to_nobody(tmp_path):
    state = tmp_path / ".out.state"
    state.mkdir()
    (state / f".{atomic.STATE_RECORD}.k2_x9abc.draftlab").write_text('{"lr"')
    with atomic.locked(tmp_path / "out"):
        atomic.claim_state(state, {"lr": 1.0})
        assert [path.name for path in state.iterdir()] == [atomic.STATE_RECORD]


def test_a_state_vanishes_at_once(tmp_path, monkeypatch):
    state = tmp_path / ".out.state"
    atomic.claim_state(state, {})
    (state / "step-1").mkdir()

    def killed():
        monkeypatch.setattr("draftlab.runs.atomic.shutil.rmtree", lambda *_, **__: os._exit(9))
        atomic.remove_state(state)

    assert in_child(killed) == 9
    assert not state.exists()
    with atomic.locked(tmp_path / "out"):
        assert hidden(tmp_path) == [".out.lock"]


def test_a_full_disk_is_said_before_the_work(tmp_path):
    with pytest.raises(UserError):
        atomic.check_space(tmp_path / "out", 10**21, "the draft")
    atomic.check_space(tmp_path / "out", 1, "the draft")


TORN = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
LARGE = Exception("File too large (os error 27)")  # as tokenizers raises it


@pytest.mark.parametrize("error", [OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), TORN, LARGE])
def test_a_disk_that_fills_up_is_said_with_what_is_kept(tmp_path, error):
    output = Output(command="report", config=ReportConfig(), out=tmp_path / "out")
    with pytest.raises(UserError, match=str(output.out)), output.locked():
        raise error
    for other in (ZeroDivisionError(), Exception("Permission denied (os error 13)")):
        with pytest.raises(type(other)), output.locked():
            raise other


def test_an_interrupted_step_of_a_command_that_resumes_names_the_folder_of_the_command(tmp_path):
    outer = Output(command="auto", config=ReportConfig(), out=tmp_path / "auto")
    step = Output(command="score", config=ReportConfig(), out=outer.out / "score")
    outer.out.mkdir()
    with (
        pytest.raises(Interrupted, match=f"{outer.out}$"),
        outer.locked(resumes=True),
        step.locked(),
    ):
        raise KeyboardInterrupt


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_command_exits_with_130_and_leaves_nothing(tmp_path, monkeypatch, number):
    def interrupted():
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(Output, "check_space", lambda *_: os.kill(os.getpid(), number))
        signal.signal(number, signal.SIG_DFL)  # nohup ignores SIGHUP
        sys.argv = ["draftlab", "prune", "--source", "tiny", "--layers", "2", "--data", "stdlib"]
        sys.argv += ["--out", "runs/out"]
        try:
            cli.main()
        except SystemExit as end:
            os._exit(int(end.code or 0))

    assert in_child(interrupted) == 130
    assert hidden(tmp_path / "runs") == []


def test_a_name_that_is_too_long_is_one_line(tmp_path):
    with pytest.raises(UserError, match=str(tmp_path)):
        atomic.check_free(tmp_path / ("x" * 300), force=False)
