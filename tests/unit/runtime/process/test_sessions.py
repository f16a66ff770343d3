"""Sessions, tried with real processes that end, refuse to, or leave children behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil
import pytest

from deploy.runtime.process import sessions
from deploy.runtime.usage import resident_bytes
from tests.unit.runtime.conftest import Spawn

Eventually = Callable[..., None]

SLEEPER = "import time; time.sleep(60)"
STUBBORN = """
    import signal, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("ready", flush=True)
    time.sleep(60)
"""
# A leader with a child and a grandchild, which write their pids once all is set up.
FAMILY = f"""
    import os, subprocess, sys, time
    child = '''
    import subprocess, sys, time
    grandchild = subprocess.Popen([sys.executable, "-S", "-c", "{SLEEPER}"])
    print("family", grandchild.pid, flush=True)
    time.sleep(60)
    '''
    import textwrap
    subprocess.Popen([sys.executable, "-S", "-c", textwrap.dedent(child)])
    time.sleep(60)
"""
# Told to stop, this leader goes at once and leaves its helper behind.
ABANDONING = f"""
    import subprocess, sys, time
    helper = "print('ready', flush=True); {SLEEPER}"
    subprocess.Popen([sys.executable, "-S", "-c", helper])
    time.sleep(60)
"""
# Its first thread ends; another one still has what the process has.
HEADLESS = """
    import ctypes, threading, time
    threading.Thread(target=time.sleep, args=(60,)).start()
    print("ready", flush=True)
    ctypes.CDLL(None).pthread_exit(None)
"""


@pytest.fixture
def log(tmp_path: Path) -> Callable[[], str]:
    return (tmp_path / "log").read_text


def started(process: subprocess.Popen[bytes]) -> float:
    found = sessions.start_time(process.pid)
    assert abs(time.clock_gettime(time.CLOCK_BOOTTIME) - found) < 30
    return found


def pids(members: list[psutil.Process]) -> set[int]:
    return {process.pid for process in members}


class TestWaitForAnEnd:
    def test_a_process_that_ends_is_noticed_at_once(self, spawn: Spawn) -> None:
        stays, goes = spawn(SLEEPER), spawn(SLEEPER)
        assert not sessions.wait_for_an_end([stays.pid, goes.pid], 0.05)
        threading.Timer(0.1, goes.kill).start()
        assert sessions.wait_for_an_end([stays.pid, goes.pid], 60)

    def test_a_process_that_is_gone_has_ended(self, spawn: Spawn) -> None:
        gone = spawn("pass")
        gone.wait()
        assert sessions.wait_for_an_end([gone.pid], 60)


class TestSpawn:
    def test_has_its_own_session(self, spawn: Spawn) -> None:
        process = spawn(SLEEPER)
        assert os.getsid(process.pid) == process.pid != os.getsid(0)

    def test_output_is_appended_to_the_log(self, spawn: Spawn, log: Callable[[], str]) -> None:
        text = "import sys; print('out', flush=True); print('err', file=sys.stderr)"
        for _ in range(2):
            assert spawn(text).wait() == 0
        assert log() == "out\nerr\n" * 2

    def test_stdin_is_empty(self, spawn: Spawn, log: Callable[[], str]) -> None:
        spawn("import sys; print(repr(sys.stdin.read()))").wait()
        assert log() == "''\n"

    def test_gets_exactly_the_given_environment(self, tmp_path: Path) -> None:
        argv = (sys.executable, "-S", "-c", "import os; print(sorted(os.environ))")
        process = sessions.spawn(argv, {"A": "1"}, log=tmp_path / "log", cwd=tmp_path)
        process.wait()
        assert set(eval((tmp_path / "log").read_text())) <= {"A", "LC_CTYPE"}  # noqa: S307 - our own

    def test_a_program_that_is_missing(self, tmp_path: Path) -> None:
        with pytest.raises(OSError, match="No such file"):
            sessions.spawn(("/no/such/program",), {}, log=tmp_path / "log", cwd=tmp_path)


class TestIsRunning:
    def test_the_same_process_is_running(self, spawn: Spawn) -> None:
        process = spawn(SLEEPER)
        assert sessions.is_running(process.pid, started(process))

    def test_another_with_its_pid_is_not_it(self, spawn: Spawn) -> None:
        process = spawn(SLEEPER)
        assert not sessions.is_running(process.pid, started(process) - 10)
        assert not sessions.is_running(process.pid, 0.0)

    def test_a_zombie_has_ended(self, spawn: Spawn, eventually: Eventually) -> None:
        process = spawn(SLEEPER)
        start = started(process)
        os.kill(process.pid, signal.SIGKILL)  # and nobody waits for it
        eventually(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE)
        assert not sessions.is_running(process.pid, start)
        assert sessions.session_members(process.pid, start) == []

    def test_a_process_that_is_gone_is_not_running(self, spawn: Spawn) -> None:
        process = spawn("pass")
        start, seen = started(process), psutil.Process(process.pid)
        process.wait()
        assert sessions.has_ended(seen)
        assert not sessions.is_running(process.pid, start)
        assert sessions.start_time(process.pid) == 0.0

    def test_a_process_that_has_lost_its_first_thread_does(
        self, spawn: Spawn, log: Callable[[], str], eventually: Eventually
    ) -> None:
        """Its sockets are open until the last thread ends: the next engine could not listen."""
        process = spawn(HEADLESS)
        eventually(lambda: "ready" in log())
        eventually(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE)
        start = started(process)
        assert sessions.is_running(process.pid, start)
        assert sessions.session_members(process.pid, start)
        sessions.end_sessions({process.pid: start}, grace_s=0.1)
        assert not sessions.is_running(process.pid, start)


class TestMembers:
    def family(
        self, spawn: Spawn, log: Callable[[], str], eventually: Eventually
    ) -> tuple[subprocess.Popen[bytes], int]:
        leader = spawn(FAMILY)
        eventually(lambda: log().endswith("\n"))  # whole: it may be written in pieces
        return leader, int(log().split()[1])

    def test_children_and_grandchildren(
        self, spawn: Spawn, log: Callable[[], str], eventually: Eventually
    ) -> None:
        leader, grandchild = self.family(spawn, log, eventually)
        members = pids(sessions.session_members(leader.pid, started(leader)))
        assert {leader.pid, grandchild} < members
        assert len(members) == 3
        assert os.getpid() not in members

    def test_those_whom_the_leader_left_behind(
        self, spawn: Spawn, log: Callable[[], str], eventually: Eventually
    ) -> None:
        leader, grandchild = self.family(spawn, log, eventually)
        start = started(leader)
        leader.kill()
        leader.wait()
        members = pids(sessions.session_members(leader.pid, start))
        assert grandchild in members
        assert len(members) == 2

    def test_a_later_session_with_the_same_id_has_no_members(self, spawn: Spawn) -> None:
        process = spawn(SLEEPER)
        assert sessions.session_members(process.pid, started(process) - 10) == []

    def test_memory_is_that_of_all(
        self, spawn: Spawn, log: Callable[[], str], eventually: Eventually
    ) -> None:
        leader, _ = self.family(spawn, log, eventually)
        members = sessions.session_members(leader.pid, started(leader))
        assert resident_bytes(members) > resident_bytes(members[:1]) > 0

    def test_memory_of_one_that_ended_meanwhile(self, spawn: Spawn) -> None:
        process = spawn("pass")
        members = [psutil.Process(process.pid)]
        process.wait()
        assert resident_bytes(members) == 0


class TestEnding:
    def end(self, *processes: subprocess.Popen[bytes], grace_s: float) -> float:
        """End their sessions; return how many seconds that took."""
        known = {process.pid: started(process) for process in processes}
        began = time.monotonic()
        sessions.end_sessions(known, grace_s=grace_s)
        for session, start in known.items():
            assert sessions.session_members(session, start) == []
        return time.monotonic() - began

    def test_a_willing_one_is_asked_and_not_killed(
        self, spawn: Spawn, log: Callable[[], str], eventually: Eventually
    ) -> None:
        process = spawn("""
            import signal, sys, time
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
            print("ready", flush=True)
            time.sleep(60)
        """)
        eventually(lambda: "ready" in log())
        assert self.end(process, grace_s=20) < 10
        assert process.wait() == 7

    def test_a_stubborn_one_is_killed_after_the_grace(
        self, spawn: Spawn, log: Callable[[], str], eventually: Eventually
    ) -> None:
        process = spawn(STUBBORN)
        eventually(lambda: "ready" in log())
        assert 0.3 <= self.end(process, grace_s=0.3) < 10
        assert process.wait() == -signal.SIGKILL

    def test_several_share_one_grace(
        self, spawn: Spawn, log: Callable[[], str], eventually: Eventually
    ) -> None:
        processes = [spawn(STUBBORN) for _ in range(3)]
        eventually(lambda: log().count("ready") == 3)
        assert 5.0 <= self.end(*processes, grace_s=5.0) < 10.0, "less than two"

    def test_the_whole_family_goes(
        self, spawn: Spawn, log: Callable[[], str], eventually: Eventually
    ) -> None:
        leader = spawn(FAMILY)
        eventually(lambda: log().endswith("\n"))  # whole: it may be written in pieces
        self.end(leader, grace_s=0.3)

    def test_helpers_of_a_dead_leader_are_not_waited_for(
        self, spawn: Spawn, log: Callable[[], str], eventually: Eventually
    ) -> None:
        leader = spawn(ABANDONING)
        start = started(leader)
        eventually(lambda: "ready" in log())
        leader.kill()
        leader.wait()
        began = time.monotonic()
        sessions.end_sessions({leader.pid: start}, grace_s=20)
        assert time.monotonic() - began < 10
        assert sessions.session_members(leader.pid, start) == []

    def test_helpers_whom_the_leader_abandons_are_not_waited_for(
        self, spawn: Spawn, log: Callable[[], str], eventually: Eventually
    ) -> None:
        """Else `down` waits its whole grace for helpers that nobody told to stop."""
        leader = spawn(ABANDONING)
        eventually(lambda: "ready" in log())
        assert self.end(leader, grace_s=60) < 30

    def test_a_process_that_only_has_the_number_is_left_alone(self, spawn: Spawn) -> None:
        process = spawn(SLEEPER)
        sessions.end_sessions({process.pid: started(process) - 10}, grace_s=0.2)
        assert process.poll() is None

    def test_nothing_to_end(self) -> None:
        began = time.monotonic()
        sessions.end_sessions({}, grace_s=5)
        assert time.monotonic() - began < 5


# Maps the shared memory file that its argument names, and cannot be asked to let go of it.
MAPPING = """
    import mmap, os, signal, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with open(os.environ["SHARED"], "r+b") as file:
        mapped = mmap.mmap(file.fileno(), 4096)
    print("ready", flush=True)
    time.sleep(60)
"""


class TestSharedMemory:
    @pytest.fixture
    def shared(self) -> Iterator[Path]:
        path = Path(f"/dev/shm/pdkit-test-{os.getpid()}")
        path.write_bytes(bytes(4096))
        yield path
        path.unlink(missing_ok=True)

    def test_shared_memory_of_a_killed_process_is_removed(
        self, spawn: Spawn, log: Callable[[], str], eventually: Eventually, shared: Path
    ) -> None:
        process = spawn(MAPPING, SHARED=str(shared))
        eventually(lambda: "ready" in log())
        sessions.end_sessions({process.pid: started(process)}, grace_s=0.1)
        assert not shared.exists()

    def test_shared_memory_mapped_by_another_process_stays(
        self, spawn: Spawn, log: Callable[[], str], eventually: Eventually, shared: Path
    ) -> None:
        process, _other = (spawn(MAPPING, SHARED=str(shared)) for _ in range(2))
        eventually(lambda: log().count("ready") == 2)
        sessions.end_sessions({process.pid: started(process)}, grace_s=0.1)
        assert shared.exists()

    def test_no_other_process_is_examined_if_nothing_was_shared(
        self, spawn: Spawn, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The maps of a machine's processes are megabytes to read."""
        looked_at: list[list[int]] = []

        def none_shared(processes: Iterable[psutil.Process]) -> set[Path]:
            looked_at.append([process.pid for process in processes])
            return set()

        process = spawn(SLEEPER)
        monkeypatch.setattr(sessions, "_shared_memory_files", none_shared)
        sessions.end_sessions({process.pid: started(process)}, grace_s=0.1)
        assert looked_at == [[process.pid]]

    def test_a_resource_tracker_has_a_moment_to_free_it_and_is_killed_then(
        self,
        spawn: Spawn,
        log: Callable[[], str],
        eventually: Eventually,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """It lives until its users are dead, and ignores TERM so that it can."""
        monkeypatch.setattr(sessions, "_TRACKER_GRACE_S", 0.2)
        tracker = spawn(f"# multiprocessing.resource_tracker\n{textwrap.dedent(STUBBORN)}")
        eventually(lambda: "ready" in log())
        sessions.end_sessions({tracker.pid: started(tracker)}, grace_s=0.1)
        assert tracker.wait() == -signal.SIGKILL


class TestMarks:
    """Marks are this test's own folder: another run of the tests may be on the machine."""

    def test_finds_orphans_by_their_mark(
        self, spawn: Spawn, log: Callable[[], str], eventually: Eventually, tmp_path: Path
    ) -> None:
        mine = tmp_path / "mine"
        leader = spawn(FAMILY, TEST_MARK=str(mine))
        eventually(lambda: log().endswith("\n"))  # whole: it may be written in pieces
        leader.kill()
        leader.wait()
        found = sessions.marked_sessions("TEST_MARK", mine)
        assert set(found) == {leader.pid}
        assert len(sessions.session_members(leader.pid, found[leader.pid])) == 2
        sessions.end_sessions(found, grace_s=0.5)
        assert sessions.marked_sessions("TEST_MARK", mine) == {}

    def test_finds_no_others(self, spawn: Spawn, tmp_path: Path) -> None:
        mine, theirs = tmp_path / "mine", tmp_path / "theirs"
        process = spawn(SLEEPER, TEST_MARK=str(theirs))
        assert sessions.marked_sessions("TEST_MARK", mine) == {}
        assert sessions.marked_sessions("OTHER_MARK", theirs) == {}
        assert set(sessions.marked_sessions("TEST_MARK", theirs)) == {process.pid}

    def test_finds_one_that_lost_its_mark_by_where_it_works(
        self, spawn: Spawn, tmp_path: Path
    ) -> None:
        """A program that gives itself a title may write it over its environment."""
        process = spawn(SLEEPER)
        assert set(sessions.marked_sessions("TEST_MARK", tmp_path)) == {process.pid}
        assert sessions.marked_sessions("TEST_MARK", tmp_path / "below") == {}

    @pytest.mark.skipif(os.getuid() != 0, reason="only root starts another user's process")
    def test_finds_none_of_another_user(self, tmp_path: Path) -> None:
        """Anyone can set a variable, and root could end anyone's process."""
        tmp_path.chmod(0o755)
        argv = ("/usr/bin/env", "sleep", "60")
        env = {"PATH": os.environ["PATH"], "TEST_MARK": str(tmp_path)}
        with subprocess.Popen(argv, env=env, cwd="/", user=65534, start_new_session=True) as other:
            try:
                assert sessions.marked_sessions("TEST_MARK", tmp_path) == {}
            finally:
                other.kill()

    @pytest.mark.skipif(os.getuid() != 0, reason="only root ends another user's process")
    def test_root_finds_those_of_the_owner_of_the_folder(self, tmp_path: Path) -> None:
        """As with `sudo deploy down`, of a stack that the user started."""
        folder = tmp_path / "stack"
        folder.mkdir()
        os.chown(folder, 65534, 65534)
        env = {"PATH": os.environ["PATH"], "TEST_MARK": str(folder)}
        argv = ("/usr/bin/env", "sleep", "60")
        with subprocess.Popen(argv, env=env, cwd="/", user=65534, start_new_session=True) as other:
            try:
                assert set(sessions.marked_sessions("TEST_MARK", folder)) == {other.pid}
            finally:
                other.kill()

    def test_never_finds_the_command_itself(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert sessions.marked_sessions("TEST_MARK", tmp_path) == {}
