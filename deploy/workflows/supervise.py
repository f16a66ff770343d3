"""The supervisor, which restarts services that die: `python -m deploy.workflows.supervise`.

Arguments: the kit's folders for state and caches, the stack. It starts one service at a time with
the code of `deploy up`, and does not wait for it, so that a router comes back while an engine loads
its model. It never interferes with a command: it acts only while no command holds the stack's lock,
and only on services whose record is still that of the process which died.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from deploy.errors import ModelChanged, NotEnoughMemory, PdkitError, PortTaken, StackLocked
from deploy.planning.engines import ENGINE_ROLES
from deploy.runtime.events import EventKind, note_event
from deploy.runtime.home import Home, StackHome
from deploy.runtime.lock import supervisor_turn
from deploy.runtime.process.front import Holder
from deploy.runtime.process.launcher import describe_exit
from deploy.runtime.process.sessions import wait_for_an_end
from deploy.runtime.supervisor import Keeper, inherited_sockets
from deploy.stack.service import PROBED_ROLES, STORE_ROLES, Service
from deploy.workflows.check import renew_store_connections
from deploy.workflows.running import RunningStack, find_stack
from deploy.workflows.service_life import (
    LONGEST_PAUSE_S,
    CoreProgress,
    Life,
    Liveness,
    RestartPolicy,
    shortage,
    waited_for,
)
from deploy.workflows.start import ABORT_GRACE_S, StackStart

_CALM_S = 1.0
_LOCKED_S = 0.5
_ASKED_AT_ONCE = 16


class Supervisor:
    """Watches one stack until it is told to end, or the stack is gone."""

    def __init__(
        self,
        home: Home,
        name: str,
        holder: Holder,
        policy: RestartPolicy | None = None,
        *,
        ended: threading.Event | None = None,
    ) -> None:
        self._home, self._name, self._holder = home, name, holder
        self._policy = policy or RestartPolicy()
        self._files = home.stack(name)
        self._lives: dict[str, Life] = {}
        self._seen: tuple[int, int] | None = None
        self._running: RunningStack | None = None
        self._asking = ThreadPoolExecutor(_ASKED_AT_ONCE)
        self.ended = ended or threading.Event()

    def run(self) -> None:
        """Watch, until `ended` is set."""
        while not self.ended.is_set():
            try:
                running = self._stack()
                if running is not None:
                    for service in running.stack.services:
                        self._look_at(running, service)
                self._wait(running)
            except (PdkitError, OSError) as exc:
                _say(f"{type(exc).__name__}: {exc}")  # such as a Docker engine that is restarted
                self.ended.wait(_CALM_S)

    def _wait(self, running: RunningStack | None) -> None:
        lives = [life for life in self._lives.values() if not life.given_up]
        if running is None:
            self.ended.wait(_CALM_S)
            return
        whole = all(life.record.pid and life.died_at is None for life in lives)
        if not whole or wait_for_an_end([life.record.pid for life in lives], _CALM_S):
            self.ended.wait(running.launcher.poll_s)

    def _stack(self) -> RunningStack | None:
        """Return the stack, read again where its state was written since."""
        try:
            found = self._files.state_file.stat()
        except FileNotFoundError:
            self.ended.set()
            return None
        seen = (found.st_ino, found.st_mtime_ns)
        if seen != self._seen:
            self._running = find_stack(self._home, self._name)
            self._seen = seen
            records = self._running.state.services if self._running else {}
            self._lives = {
                name: life
                if (life := self._lives.get(name)) and life.record == record
                else Life(record, *self._probes())
                for name, record in records.items()
            }
        return self._running

    def _look_at(self, running: RunningStack, service: Service) -> None:
        life, now = self._lives.get(service.name), time.monotonic()
        if life is None or life.given_up:
            return
        if life.due is not None:
            if now >= life.due:
                self._start(service, life)
        elif running.launcher.state(life.record) != "running":
            self._died(running, service, life)
        elif life.died_at is not None:
            if running.is_ready(service):
                self._came_back(running, service, life)
        else:
            if now - life.serves_since > self._policy.calm_s:
                life.deaths = 0
            if service.role in PROBED_ROLES:
                self._check_liveness(running, service, life)

    def _check_liveness(self, running: RunningStack, service: Service, life: Life) -> None:
        """End a service that hangs, unless a command is at work; then it has died."""
        if (pid := running.launcher.pid(life.record)) != life.pid:  # such as by Docker, unseen
            life.pid, (life.liveness, life.work) = pid, self._probes()
        life.liveness.probe(
            lambda: running.is_ready(service),
            time.monotonic(),
            lambda: running.launcher.uptime_s(life.record) > service.ready_s,
        )
        if service.role in ENGINE_ROLES:
            life.work.probe(lambda: waited_for(running, service), time.monotonic())
        limits = running.prepared.spec.timeouts
        if life.liveness.silent_s > limits.hung_s:
            text = f"has failed its health checks for {life.liveness.silent_s:g} s"
        elif life.work.still_s > limits.stuck_s:
            text = f"has requests and has computed nothing for {life.work.still_s:g} s"
        else:
            return
        self._end(running, service, life, text)

    def _end(self, running: RunningStack, service: Service, life: Life, text: str) -> None:
        with suppress(StackLocked), supervisor_turn(self._lock, self._name):
            if self._is_another(life):
                return
            life.liveness, life.work = self._probes()  # as long again, if it cannot be ended
            try:
                running.launcher.stop({service.name: life.record}, grace_s=ABORT_GRACE_S)
            except (PdkitError, OSError) as exc:
                self._note(service, "failed", f"{text}, and cannot be stopped: {exc}")
                return
            self._note(service, "hung", f"{text}; stopped")
            life.started = None  # its exit code is of our making

    def _probes(self) -> tuple[Liveness, CoreProgress]:
        return Liveness(self._asking.submit), CoreProgress(self._asking.submit)

    def _died(self, running: RunningStack, service: Service, life: Life) -> None:
        """Record a death, unless a command is at work, which may have caused it.

        A start for which the machine had too little memory or disk is no death: it is tried again
        for as long as that lasts.
        """
        how = life.started.ended if life.started else None
        with suppress(StackLocked), supervisor_turn(self._lock, self._name):
            if self._is_another(life):
                return
            if (
                life.started
                and life.died_at
                and (lacked := shortage(running.launcher, life.started))
            ):
                what, line = lacked
                self._await(service, life, what, f"died while starting: {line}")
                return
            life.deaths += 1
            life.died_at = life.died_at or time.monotonic()
            if life.deaths > self._policy.deaths:
                life.given_up = True
                self._note(
                    service, "crash_loop",
                    f"died {life.deaths} times and is not started again; deploy logs "
                    f"{service.name}, then deploy restart {service.name}",
                )  # fmt: skip
                if service.role == "router":
                    self._holder.drop()  # clients that connect would never get an answer
                return
            pause_s = self._policy.pause_before(life.deaths)
            life.due = time.monotonic() + pause_s
            when = f"in {pause_s:g} s" if pause_s else "now"
            self._note(service, "died", f"died{f' ({how})' if how else ''}; started again {when}")

    def _start(self, service: Service, life: Life) -> None:
        """Start a service that died; later, if a command is at work or the disk is full."""
        try:
            with supervisor_turn(self._lock, self._name):
                self._start_now(service, life)
        except StackLocked:
            life.due = time.monotonic() + _LOCKED_S
        except ModelChanged as exc:  # the old files may be put back
            self._await(service, life, exc.code, f"cannot be started: {exc.message}: {exc.hint}")
        except (NotEnoughMemory, PortTaken) as exc:
            self._await(service, life, exc.code, f"cannot be started yet: {exc.message}")
        except PdkitError as exc:
            life.due = None  # counts as another death
            self._note(service, "failed", f"cannot be started: {exc.message}")
        except OSError as exc:
            self._await(service, life, str(exc), f"cannot be started yet: {exc}")

    def _await(self, service: Service, life: Life, what: str, text: str) -> None:
        """Try a start again later, for as long as something is in its way; note it once."""
        life.tries += 1
        pause_s = min(LONGEST_PAUSE_S, self._policy.pause_before(life.tries + 1))
        life.due = time.monotonic() + pause_s
        told = f"{text}; retried at least every {LONGEST_PAUSE_S:g} s, as long as this lasts"
        if life.waits_for == what:
            _say(f"{service.name} {text}; tried again in {pause_s:g} s")
        else:
            life.waits_for = what
            self._note(service, "failed", told)

    def _start_now(self, service: Service, life: Life) -> None:
        if self._is_another(life) or (running := self._stack()) is None:
            life.due = None
            return
        if service.role in ENGINE_ROLES and any(
            self._is_missing(name) for name in service.depends_on
        ):
            life.due = time.monotonic() + _LOCKED_S
            return
        start = StackStart(running.prepared, running.state, self._home, _say)
        life.started = start.start_again(service)
        life.record, life.due = life.started.record, None
        start.launcher.keep_up({service.name: life.record})
        self._holder.front = start.launcher.take_front() or self._holder.front

    def _is_missing(self, name: str) -> bool:
        """Tell whether a service is about to come back.

        Without its Redis an engine would die again. While another one is loading on the same GPU,
        it would misjudge the free memory.
        """
        life = self._lives.get(name)
        return life is not None and life.died_at is not None and not life.given_up

    def _came_back(self, running: RunningStack, service: Service, life: Life) -> None:
        took_s = time.monotonic() - (life.died_at or 0)
        life.died_at, life.serves_since = None, time.monotonic()
        life.tries, life.waits_for = 0, ""
        self._note(service, "back", f"serves again after {took_s:.1f} s")
        if service.role in STORE_ROLES:
            threading.Thread(target=self._renew, args=(running,), daemon=True).start()

    def _renew(self, running: RunningStack) -> None:
        """Send each engine the request on which it finds the new store."""
        try:
            renew_store_connections(self._home, running)
        except (PdkitError, OSError) as exc:
            _say(f"connections to the store: {exc}")

    def _is_another(self, life: Life) -> bool:
        """Tell whether the state file names another process by now, or none."""
        self._stack()
        return self._lives.get(life.record.name) is not life

    def _note(self, service: Service, kind: EventKind, text: str) -> None:
        _say(f"{service.name} {text}")
        _note_if_up(self._files, service.name, kind, text)

    @property
    def _lock(self) -> Path:
        return self._home.lock_file(self._name)


def _note_if_up(files: StackHome, service: str, kind: EventKind, text: str) -> None:
    """Record an event, unless the stack is down: its folder would come back."""
    if files.state_file.exists():
        with suppress(OSError):  # such as a full disk
            note_event(files.events_file, service, kind, text)


def _say(line: str) -> None:
    with suppress(OSError):  # such as a full disk
        sys.stderr.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")
        sys.stderr.flush()


def main() -> None:
    """Watch a stack in a child process, and in a new one if that dies."""
    state, cache, name = sys.argv[1:]
    home = Home(Path(state), Path(cache))
    door, front = inherited_sockets()
    keeper, own_pid, policy = Keeper(), os.getpid(), RestartPolicy()
    deaths, since = 0, time.monotonic()
    while not keeper.forked():
        if front:  # the worker's, which may replace it; the next one does without
            front.close()
            front = None
        if (code := keeper.death()) is None:
            return
        text = f"died ({describe_exit(code)}); started again"
        _say(f"supervisor {text}")
        _note_if_up(home.stack(name), "supervisor", "died", text)
        deaths = 1 if time.monotonic() - since > policy.calm_s else deaths + 1
        keeper.ended.wait(policy.pause_before(deaths + 1))
        since = time.monotonic()
    Supervisor(home, name, Holder(door, front, own_pid), ended=keeper.ended).run()


if __name__ == "__main__":
    main()
