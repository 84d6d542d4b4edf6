"""`incseg demo`: serve a local web page for one model, or two side by side."""

from __future__ import annotations

import argparse
import sys
import threading
import webbrowser
from pathlib import Path
from types import FrameType

from incseg.cli.main import add_common
from incseg.demo.models import Models
from incseg.demo.server import DEFAULT_PORT, DemoServer
from incseg.engine.runtime import handling

HELP = "a local web page: drop an image, see mask and uncertainty; teach the model a class"
READY = "voc20"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", default=READY,
        help=f"run folder, a folder of its steps/, or a .safetensors model (default: {READY}, which comes with incseg)",
    )  # fmt: skip
    parser.add_argument("other", metavar="MODEL2", nargs="?", help="another model, to compare side by side")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help=f"0 for any free one (default: {DEFAULT_PORT})")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine only)"
    )
    parser.add_argument("--open", action="store_true", help="open the page in the browser")
    add_common(parser, "--method", "--device", "--threads")
    parser.epilog = "Images stay on this machine. Ctrl-C ends the server. To compare steps of a run, give it twice."


def run(args: argparse.Namespace) -> int:
    paths = [Path(path) for path in (args.model, args.other) if path is not None]
    server = DemoServer(Models(paths, args.device, args.threads, args.method), args.host, args.port)
    with handling(_interrupt, "SIGINT", "SIGTERM"):  # SIGINT too: shells let background processes ignore it
        try:
            print(f"{server.url}  (Ctrl-C ends it)", flush=True)
            if not server.is_local:
                print(
                    f"warning: everyone who can connect to port {server.server_port} of this machine can use the page; "
                    "it has no password",
                    file=sys.stderr,
                )
            if args.open:  # in a thread, because the call of a terminal browser returns only when it is closed
                threading.Thread(target=webbrowser.open, args=(server.url,), daemon=True).start()
            server.serve_forever()
        except KeyboardInterrupt:
            print("stopped")
        finally:
            server.server_close()
    return 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
