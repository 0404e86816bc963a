"""One training run: where it starts, the loop, and what it leaves behind.

The workdir holds config.json, spec.json, tokenizer.json, metrics.jsonl, tensorboard/ and
checkpoints/. Running again with the same config and workdir resumes: the losses are those of a run
that was never stopped, bit for bit on the same platform and device count.
"""

import contextlib
import functools
import json
import logging
from collections.abc import Collection, Iterator, Sequence
from typing import NoReturn

import jax
import numpy as np

from deconstruct import benchmarks, checkpoint, flops, kernels, metrics, sharding, step, validation
from deconstruct import tokenizer as tokenizer_lib
from deconstruct.account import conclude, introduce
from deconstruct.config import Config
from deconstruct.data import loader
from deconstruct.resume import (
    FREE_KEYS,
    HINTS,
    identity_of,
    starting_state,
    stored_form,
)
from deconstruct.setup import CONFIG_FILE, SPEC_FILE, Run, choose_devices, open_workdir, set_up
from deconstruct.step import TrainState
from deconstruct.stopping import Stop

_log = logging.getLogger(__name__)


def train(config: Config, workdir: str, allow_change: Sequence[str] = ()) -> None:
    """Trains to `config.num_steps`, from the newest checkpoint in `workdir` where there is one.

    Args:
      config: the run.
      workdir: its directory; made when it is not there.
      allow_change: dotted keys (`config.learning_rate`, `data_fingerprint`) that may differ from
        the checkpoint's.

    Raises:
      ValueError: whatever the user can mend: config, data, workdir, a checkpoint of another run, a
        step that is not finite, a disk that fails, a stop by SIGTERM or Ctrl-C after a new step
        was saved.
    """
    with Stop() as stop, disk_failure_explained(workdir):
        devices = choose_devices(config.compute.platform)
        with open_workdir(workdir) as folder:
            run = set_up(config, folder, devices)
            state = _train(run, allow_change, stop)
            stop.release("stopped by {signal} after the last step, which is saved")
            conclude(run, state)


def _train(run: Run, allow_change: Sequence[str], stop: Stop) -> TrainState:
    """The state after num_steps, from the newest checkpoint or from the start."""
    identity, log = identity_of(run), run.config.log
    with checkpoint.Checkpointer(
        run.workdir, identity, free=FREE_KEYS, allowed=allow_change, hints=HINTS
    ) as saved:
        state, tokens = starting_state(run, saved)
        write_facts(run, identity)
        with metrics.MetricsWriter(
            run.workdir,
            restored_step=int(state.step) or None,
            tensorboard=log.tensorboard,
            wandb_project=log.wandb_project,
        ) as writer:
            return Loop(run, saved, writer, tokens, stop).run(state)


@contextlib.contextmanager
def disk_failure_explained(workdir: str) -> Iterator[None]:
    """One ValueError for what a disk does that is full, unmounted or broken."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"a file did not write or read: {error}. Checkpoints in {workdir} are whole: mend the "
            "disk and run the same command again"
        ) from error


def write_facts(run: Run, identity: checkpoint.Identity) -> None:
    """config.json, spec.json and tokenizer.json, once it is sure that the workdir is this run's."""
    if jax.process_index() != 0:
        return
    for name, text in (
        (CONFIG_FILE, json.dumps(identity.config, indent=1)),
        (SPEC_FILE, run.spec.to_json()),
        (tokenizer_lib.FILE_NAME, run.data.tokenizer.json),
    ):
        partial = run.workdir / f"{name}.partial"
        partial.write_text(text, encoding="utf-8")
        partial.replace(run.workdir / name)


class Loop:
    """Steps, logs, validates and saves until num_steps, or until a signal asks to stop.

    The metrics of a step are fetched after the next one is dispatched, so that the device never
    waits for the host. Before anything that depends on them (validation, a save) they are caught
    up with.
    """

    def __init__(
        self,
        run: Run,
        saved: checkpoint.Checkpointer,
        writer: metrics.MetricsWriter,
        tokens: int,
        stop: Stop,
    ):
        self.setup, self.config, self.spec = run, run.config, run.spec
        self.saved, self.writer, self.tokens, self.stop = saved, writer, tokens, stop
        self.hosts = {"process_index": jax.process_index(), "process_count": jax.process_count()}
        self.clock = metrics.Clock(
            flops_per_token=flops.train_flops_per_token(self.spec, self.config.batch_size),
            peak_flops=peak_flops(run.mesh.devices.ravel().tolist()),
        )
        every = self.config.benchmarks.every
        self.benchmarks = None if every is None else benchmarks.Benchmarks(run)
        self.pending: tuple[int, dict] | None = None
        self.layer_grad_norm: np.ndarray | None = None

    def run(self, state: TrainState) -> TrainState:
        """The state after num_steps."""
        first, last = int(state.step), self.config.num_steps
        if first == last:
            with contextlib.closing(metrics.Progress(last, first)) as self.progress:
                self.make_up(first, state)
            print(f"all {last} steps are done; nothing is left to train")
            return state
        introduce(self.setup, state)
        train_step = self.compile()
        with (
            contextlib.closing(self.batches(first)) as batches,
            contextlib.closing(metrics.Progress(last, first)) as self.progress,
        ):
            self.make_up(first, state)
            self.clock.start()
            for number in range(first + 1, last + 1):
                rows = next(batches, None)
                if rows is None:  # a signal came while they were waited for
                    self.end(number - 1, state)
                batch = sharding.place_batch(rows, self.setup.mesh)
                self.stop.hold()
                state, fetched_later = train_step(state, batch)
                self.catch_up()
                self.pending = (number, fetched_later)
                saved = self.act(number, state, batch)
                if saved and self.stop.asked:
                    self.end(number, state)
            share = self.clock.goodput()
            self.progress.say(f"goodput {share:.0%}: the time's share of steps after the first")
        return state

    def compile(self):
        """The train step; what else a run needs, too, for a stop could not break it off later."""
        print("compiling the train step ...")
        run, log = self.setup, self.config.log
        batch = step.abstract_batch(self.spec, self.config.batch_size, run.mesh)
        with kernels.watch_choices() as chosen:
            train_step = step.compile_train_step(run.program, run.mesh, batch)
        if chosen:
            forms = (f"{op} by {', '.join(sorted(names))}" for op, names in sorted(chosen.items()))
            print(f"kernels: {'; '.join(forms)}")
        if run.data.held_out(self.config.data.validation):
            _ = self.validate_rows
        if log.diagnose_every is not None:
            _ = self.diagnose
        return train_step

    @functools.cached_property
    def validate_rows(self):
        return validation.compiled(self.setup)

    @functools.cached_property
    def diagnose(self):
        rows = self.config.batch_size
        return step.compile_look(step.diagnose, self.setup.program, self.setup.mesh, rows)

    def stopped(self) -> bool:
        return self.stop.asked is not None

    def end(self, number: int, state: TrainState) -> NoReturn:
        """Ends a run that a signal asks to stop once its newest step, `number`, is saved."""
        self.catch_up()
        if self.saved.latest_step != number:
            self.save(number, state, None)
        self.saved.wait()
        raise ValueError(
            f"stopped by {self.stop.asked} after step {number}, which is saved: run the same "
            "command again to go on"
        )

    def batches(self, start_step: int):
        return loader.training_batches(
            self.setup.data,
            batch_size=self.config.batch_size,
            seed=self.config.seed,
            start_step=start_step,
            num_workers=self.config.data.num_workers,
            stopped=self.stopped,
            **self.hosts,
        )

    def due(self, number: int, every: int | None) -> bool:
        """Whether what comes `every` so many steps, and after the last, comes after `number`."""
        return every is not None and (number % every == 0 or number == self.config.num_steps)

    def act(self, number: int, state: TrainState, batch) -> bool:
        """What is due after step `number` beside its log line; returns whether it was saved.

        It is saved if the run is to stop, too.
        """
        validate = self.due(number, self.config.validate_every)
        benchmark = self.due(number, self.config.benchmarks.every)
        diagnose = self.due(number, self.config.log.diagnose_every)
        save = self.due(number, self.config.checkpoint_every)
        if not (validate or benchmark or diagnose or save or self.stop.asked):
            self.saved.check()
            return False
        self.catch_up()
        loss = None
        with self.clock.pause():
            if diagnose:
                self.write_diagnostics(number, state, batch)
            if validate:
                loss = self.validate(number, state)
            if benchmark:
                self.benchmark(number, state)
            save = save or self.stop.asked  # asked once: a signal may come at any moment
            if save:
                self.save(number, state, loss)
        return save

    def save(self, number: int, state: TrainState, validation_loss: float | None) -> None:
        weights, optimizer = stored_form(self.setup.program, state)
        self.saved.save(
            number,
            weights,
            optimizer,
            data_position=number * self.config.batch_size,
            tokens=self.tokens,
            validation_loss=validation_loss,
        )

    def catch_up(self) -> None:
        """Fetches and reports the step whose metrics are still on the device."""
        if self.pending is None:
            return
        (number, on_device), self.pending = self.pending, None
        values = jax.device_get(on_device)
        self.check_finite(number, values)
        self.report_epochs(number)
        trained = int(values["tokens"])
        self.tokens += trained
        self.layer_grad_norm = values["layer_grad_norm"]
        self.clock.steps_done(trained, self.config.batch_size * self.spec.max_len)
        last = self.config.num_steps
        if number % self.config.log_every and number not in (1, last):
            return
        window = self.clock.window()
        record = {
            "loss": values["loss"],
            "tokens": self.tokens,
            "learning_rate": values["learning_rate"],
            "grad_norm": values["grad_norm"],
        }
        if window is not None:
            record["tokens_per_second"] = window.tokens_per_second
            record["positions_per_second"] = window.positions_per_second
            if window.mfu is not None:
                record["mfu"] = window.mfu
        if self.config.non_finite.policy == "skip":
            record["skipped"] = values["skipped"]
        self.writer.write("train", number, record)
        self.progress.update(
            number,
            float(values["loss"]),
            window and window.tokens_per_second,
            self.clock.seconds_left(last - number),
        )

    def report_epochs(self, number: int) -> None:
        """Each source of which step `number` read the first row of a further epoch."""
        batch_size = self.config.batch_size
        for name, epoch in self.setup.data.turns((number - 1) * batch_size, number * batch_size):
            self.writer.write("epoch", number, {"epoch": epoch}, name)
            self.progress.say(f"step {number}  data {name}: epoch {epoch} begins, in a new order")

    def check_finite(self, number: int, values) -> None:
        """Stops the run, or counts, by the config's policy; the update was not applied."""
        if values["finite"]:
            return
        policy = self.config.non_finite
        first_row = (number - 1) * self.config.batch_size
        passes = self.setup.data.passes(first_row)
        epoch = "/".join(str(int(done) + 1) for done in passes)
        what = (
            f"step {number} is not finite (loss {values['loss']}, gradient norm "
            f"{values['grad_norm']}; epoch {epoch}, rows {first_row} to "
            f"{first_row + self.config.batch_size - 1} of the data order)"
        )
        if policy.policy == "skip" and values["skipped"] <= policy.max_skips:
            self.progress.say(f"{what}: update skipped, {values['skipped']} so far")
            return
        newest = self.saved.latest_step
        kept = "no checkpoint was made yet" if newest is None else f"checkpoint {newest} is good"
        limit = f" after {policy.max_skips} skips" if policy.policy == "skip" else ""
        raise ValueError(
            f"{what}: stopped{limit} and its update not applied; {kept}. Lower learning_rate, or "
            "set --config.non_finite.policy=skip"
        )

    def validate(self, number: int, state: TrainState, done: Collection[str] = ()) -> float | None:
        """Loss and bits per byte on each held-out set; the first one's loss is returned.

        Sets named in `done` are left out. A signal breaks it off, so that the step is saved before
        the machine is gone; what is missing is made up for when the run goes on.
        """
        losses = []
        for held_out in self.setup.data.held_out(self.config.data.validation):
            name = held_out.name
            if name in done:
                continue
            found = validation.validation_loss(
                self.setup, self.validate_rows, state, held_out, self.hosts, self.stopped
            )
            if found is None:
                break
            loss, bits = found
            self.writer.write("validation", number, {"loss": loss, "bits_per_byte": bits}, name)
            self.progress.say(f"step {number}  {name}: loss {loss:.4f}, {bits:.4f} bits per byte")
            losses.append(loss)
        return losses[0] if losses else None

    def benchmark(self, number: int, state: TrainState) -> None:
        """Figures of the chosen tasks; a signal breaks them off, as a validation."""
        found = self.benchmarks.figures(state.params, state.fixed, self.stopped)
        for task, figures in (found or {}).items():
            self.writer.write("benchmark", number, figures, task)
            said = ", ".join(f"{name} {value:.5g}" for name, value in figures.items())
            self.progress.say(f"step {number}  {task}: {said}")

    def make_up(self, number: int, state: TrainState) -> None:
        """What a stop left out after the step that the run resumes from."""
        if number == 0:
            return
        records = metrics.read_metrics(self.setup.workdir / metrics.METRICS_FILE)
        done = [(r["kind"], r["name"]) for r in records if r["step"] == number and "name" in r]
        if self.due(number, self.config.validate_every):
            self.validate(number, state, [name for kind, name in done if kind == "validation"])
        benchmarked = any(kind == "benchmark" for kind, _ in done)
        if self.due(number, self.config.benchmarks.every) and not benchmarked:
            self.benchmark(number, state)

    def write_diagnostics(self, number: int, state: TrainState, batch) -> None:
        """Per-layer measures on the first row of the step's batch."""
        with jax.set_mesh(self.setup.mesh):
            found = jax.device_get(self.diagnose(state.params, state.fixed, batch))
        found["grad_norm"] = self.layer_grad_norm
        names = [layer.name for layer in self.spec.layers]
        by_layer = {
            measure: dict(zip(names, values, strict=True)) for measure, values in found.items()
        }
        self.writer.write("diagnostics", number, by_layer)


def peak_flops(devices: list[jax.Device]) -> float | None:
    """FLOP/s of all devices together at bfloat16; None where the kind's peak is unknown."""
    peak = metrics.PEAK_FLOPS.get(devices[0].device_kind)
    return None if peak is None else peak * len(devices)
