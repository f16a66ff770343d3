"""The stacks of a sweep: one at a time, all under one name that belongs to the sweep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from deploy.benchmark.dataset import fitting_lines
from deploy.benchmark.results import Result
from deploy.benchmark.workloads import WorkloadOptions
from deploy.config.spec import StackSpec
from deploy.errors import CheckFailed, ConfigError, PortTaken, StateError, UsageError
from deploy.runtime.home import Home
from deploy.runtime.lock import stack_lock
from deploy.workflows.bench import BenchOptions, bench_stack
from deploy.workflows.down import stop_stack
from deploy.workflows.preflight import require_fit
from deploy.workflows.prepare import Report
from deploy.workflows.start import require_host_memory, require_ports
from deploy.workflows.sweep.start import free_port
from deploy.workflows.up import bring_up, prepare_here
from deploy.workflows.user_files import require_user_files

_CLAIM = "sweep-stack"
_PORTS_TRIED = 5


class LiveStacks:
    """Stacks of this machine.

    The name is recorded before anything is started, so that the next sweep can stop what a killed
    one left, and nothing else.

    Args:
        own_port: the user chose the port; else a stack whose port was taken meanwhile gets another.
    """

    def __init__(
        self,
        home: Home,
        name: str,
        command: Sequence[str],
        report: Report,
        *,
        own_port: bool = False,
    ) -> None:
        self._own_port = own_port
        self._home = home
        self._name = name
        self._command = command
        self._report = report
        self._claim = home.bench / _CLAIM
        self._told: set[str] = set()

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Hold the name; nothing of it is left when the block ends.

        Raises:
            StateError: a stack of that name is not a sweep's.
        """
        left = self._claim.read_text(encoding="utf-8").strip() if self._claim.exists() else ""
        if left:
            self._report(f"taking down what an earlier sweep left: '{left}'")
            with stack_lock(self._home.lock_file(left), left):
                self._stop(left)
        elif self._home.stack(self._name).state_file.exists():
            raise StateError(
                f"there is a stack '{self._name}', which no sweep started",
                hint=f"deploy bench sweep --name NAME with another name, or deploy down --name "
                f"{self._name}",
            )
        self._claim.parent.mkdir(parents=True, exist_ok=True)
        self._claim.write_text(self._name + "\n", encoding="utf-8")
        with stack_lock(self._home.lock_file(self._name), self._name):
            try:
                yield
            finally:
                self.down()
                self._claim.unlink(missing_ok=True)

    def require(self, spec: StackSpec, workload: WorkloadOptions) -> None:
        """Check that a stack could be started beside what runs here. Starts nothing.

        Raises:
            ConfigError: it cannot be planned, or the workload does not fit its context.
            MachineError: this machine lacks something, or other stacks hold it.
        """
        planned = prepare_here(spec, self._home, self._once)
        require_user_files(planned, self._home.stack(spec.name).secrets_dir)
        require_fit(planned, self._home, self._once)
        require_host_memory(planned, planned.stack.services)
        require_ports(planned, self._home, planned.stack.services)
        if planned.plan.max_model_len:
            try:
                fitting_lines(workload, planned.plan.max_model_len)
            except UsageError as exc:
                raise ConfigError(exc.message, hint=exc.hint) from exc

    def _once(self, line: str) -> None:
        """Report a line once that every stack of a sweep would repeat."""
        if line not in self._told:
            self._told.add(line)
            self._report(line)

    def up(self, spec: StackSpec) -> None:
        """Start a stack, and check it.

        Raises:
            MachineError: this machine lacks something.
            StackUnhealthy: it did not start.
            CheckFailed: it serves, but its check failed.
        """
        for left in reversed(range(_PORTS_TRIED)):
            try:
                self._up(spec)
                break
            except PortTaken as exc:
                if self._own_port or not left:
                    raise
                self.down()
                spec = spec.model_copy(update={"port": free_port(spec.bind)})
                self._report(f"{exc.message}: trying again with port {spec.port}")

    def _up(self, spec: StackSpec) -> None:
        _, checked = bring_up(spec, self._home, self._report, check=True)
        if checked and not checked.passed:
            raise CheckFailed(checked.failures[0], hint="deploy up with the same options")

    def load(self, options: BenchOptions, folder: Path) -> Result:
        """Load the stack that is up.

        Raises:
            CheckFailed: the workload does not fit it; it may fit another topology, or another TP.
            StackUnhealthy: it stopped answering.
        """
        folder.mkdir(parents=True)
        try:
            return bench_stack(
                self._home,
                self._name,
                options,
                folder=folder,
                command=self._command,
                report=self._report,
            )
        except UsageError as exc:
            raise CheckFailed(exc.message, hint=exc.hint) from exc

    def down(self) -> None:
        """Stop the stack, if one is up."""
        self._stop(self._name)

    def _stop(self, name: str) -> None:
        """Stop a stack whose lock is held."""
        stop_stack(self._home, name, lambda _: None)
