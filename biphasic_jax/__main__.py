"""The verbs: `python -m biphasic_jax VERB ...`, or `biphasic VERB ...`."""

import argparse
import difflib
import errno
import importlib
import importlib.metadata
import os
import signal
import sys
import traceback

from biphasic_jax.errors import EXIT_BAD_INPUT, EXIT_INTERRUPTED, Interrupted, UserError

# verb -> (module with configure(parser) and main(args), one line of help)
VERBS = {
    "prepare": ("biphasic_jax.data.prepare", "tokenise and pack a corpus into rows"),
    "inspect": ("biphasic_jax.data.inspect_rows", "show the rows of a run as the device would get them"),
    "train": ("biphasic_jax.train.loop", "run the phases of a config; the same command goes on where it stopped"),
    "evaluate": ("biphasic_jax.train.evaluate", "measure a checkpoint on held-out rows"),
    "fill-mask": ("biphasic_jax.train.fill_mask", "what a checkpoint puts in place of a mask"),
    "report": ("biphasic_jax.train.report", "write report.md and its curves for a run"),
    "bench": ("biphasic_jax.bench.run", "measure the speed of this machine and this code"),
}


class Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are one line that starts with `error:`."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise UserError(f"{message}; see {self.prog} --help")


def parse(argv: list[str]) -> tuple[str, argparse.Namespace]:
    """The module of the verb and its arguments; `--config.KEY=VALUE` are gathered in `overrides`."""
    overview = "\n".join(f"  {verb:<11}{text}" for verb, (_, text) in VERBS.items())
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(f"usage: python -m biphasic_jax VERB ...\n\n{__doc__}\n\n{overview}\n\nVERB --help tells more of each.")
        raise SystemExit(0)
    if argv[0] == "--version":
        print(f"biphasic_jax {importlib.metadata.version('biphasic_jax')}")
        raise SystemExit(0)
    verb = argv[0]
    if verb not in VERBS:
        near = difflib.get_close_matches(verb, VERBS, n=1) or list(VERBS)
        raise UserError(f"{verb!r} is not a verb; did you mean {', '.join(near)}? See python -m biphasic_jax --help")
    module_name, text = VERBS[verb]
    module = importlib.import_module(module_name)
    parser = Parser(
        prog=f"python -m biphasic_jax {verb}", description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    module.configure(parser)
    overrides: list[str] = []
    rest: list[str] = []
    expect = False
    for word in argv[1:]:
        if expect:
            overrides[-1] += f"={word}"
            expect = False
        elif word.startswith("--config."):
            overrides.append(word.removeprefix("--config."))
            expect = "=" not in word
        else:
            rest.append(word)
    if overrides and not any("--config" in action.option_strings for action in parser._actions):
        raise UserError(f"--config.{overrides[0]}: {verb} takes no config")
    flags = [flag for action in parser._actions for flag in action.option_strings]
    for word in rest:  # before argparse, which would name what is missing rather than what is misspelt
        flag = word.partition("=")[0]
        if flag.startswith("--") and flag not in flags:
            near = difflib.get_close_matches(flag, flags, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; see {parser.prog} --help"
            raise UserError(f"{flag} is not an argument of {verb}{hint}")
    args = parser.parse_args(rest)
    args.overrides = overrides
    return module_name, args


def main(argv: list[str] | None = None) -> int:
    """Runs a verb; returns the exit code (0 done, 2 bad input, 83 stopped after a checkpoint, 1 anything else)."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        module_name, args = parse(argv)
        return importlib.import_module(module_name).main(args)
    except UserError as error:
        return fail(str(error))
    except Interrupted as stop:
        print(stop, file=sys.stderr)
        return EXIT_INTERRUPTED
    except KeyboardInterrupt:
        print("stopped; the same command goes on from what is complete", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES):
            where = f" at {error.filename!r}" if error.filename else ""
            return fail(f"{error.strerror}{where}: what is complete stays; make room and run the same command")
        traceback.print_exc()
        return 1
    except Exception:
        traceback.print_exc()
        return 1


def fail(message: str) -> int:
    """One line on stderr that starts `error:`, and the exit code of bad input."""
    if os.environ.get("BIPHASIC_TRACEBACK"):
        traceback.print_exc()
    print("error: " + " ".join(message.split()), file=sys.stderr)
    return EXIT_BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
