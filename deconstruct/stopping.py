"""SIGTERM, by which schedulers announce that a machine is taken away, and Ctrl-C (SIGINT)."""

import os
import signal
import sys
import threading

SIGNALS = (signal.SIGTERM, signal.SIGINT)
_LINE = (
    "error: stopped by {signal} before a new step was done: nothing is lost; run the same command "
    "again to go on"
)


class Stop:
    """What the SIGNALS do to a command, from entering this context to leaving it.

    Until `hold` is called they end the process at once, with one line and status 1: there is
    nothing new to save, and a compilation may outlast the time that a scheduler grants. From then
    on they only set `asked` to the signal's name, for the run to save and end; a second Ctrl-C is
    then a KeyboardInterrupt, for those who do not want to wait for that. After `release` they end
    the process at once again.

    Outside the main thread no handler can be set, and the signals do what they did before.

    Args:
      line: what is said when the process ends at once; `{signal}` is the signal's name.
    """

    def __init__(self, line: str = _LINE):
        self.asked: str | None = None
        self._line = line
        self._held = False
        self._undo = None

    def hold(self) -> None:
        """There is something to save from now on."""
        self._held = True

    def release(self, what: str) -> None:
        """All is saved: from now on a signal ends the process at once, and `what` is said.

        Raises:
          ValueError: `what`, where a signal has come already.
        """
        if self.asked:  # by now `_watch` may still be about to read of that signal: held it stays
            raise ValueError(what.format(signal=self.asked))
        self._line, self._held = f"error: {what}", False

    def __enter__(self) -> "Stop":
        if threading.current_thread() is not threading.main_thread():
            return self
        # Python runs a handler only once the main thread is back from C code. The byte that it
        # writes here comes at once, whatever that thread is doing.
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        threading.Thread(target=self._watch, args=[reader], name="stop", daemon=True).start()
        wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        handlers = {number: signal.signal(number, self._ask) for number in SIGNALS}
        self._undo = handlers, wakeup, writer
        return self

    def __exit__(self, *_) -> None:
        if self._undo is not None:
            handlers, wakeup, writer = self._undo
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(wakeup)
            os.close(writer)

    def _ask(self, number: int, _) -> None:
        self.asked = signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _watch(self, reader: int) -> None:
        """Ends the process where nothing is held; returns when the context is left."""
        while number := os.read(reader, 1):
            if number[0] in SIGNALS and not self._held:
                try:
                    line = self._line.format(signal=signal.Signals(number[0]).name)
                    os.write(2, f"{line}\n".encode())  # takes no lock that the main thread may hold
                    sys.stdout.flush()
                finally:
                    os._exit(1)
        os.close(reader)
