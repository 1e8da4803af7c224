"""A process that imports once and forks a child for each save that is to be struck down.

Each line of its input is a JSON object: root, step, fault, keep_last, max_file_bytes. It answers with the child's exit
code, negative for a signal; the words of a refusal are in error.txt beside the root.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path

import torch

from tests.checkpoint import states
from unison.checkpoint.retention import Retention
from unison.core.errors import UnisonError
from unison.core.faults import arm_faults


def save_and_exit(root: str, step: int, fault: str, keep_last: int, max_file_bytes: int) -> None:
    arm_faults(fault)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, resource.RLIM_INFINITY))
    try:
        states.save(Path(root), step, Retention(keep_last=keep_last))
    except UnisonError as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        Path(root).with_name("error.txt").write_text(str(error))
        os._exit(3)
    os._exit(0)


def main() -> None:
    torch.set_num_threads(1)
    states.tensors(0)  # whatever torch sets up at its first call, once
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            save_and_exit(**json.loads(line))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
