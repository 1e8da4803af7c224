"""Answers that try to run code, hang, fill the memory or break the terminal; and a program that grades them.

Run as a program with the path of a file that must not appear: it grades every answer with every registered grader
and prints one line of JSON: what raised, what was slow, and what the interpreter was asked to do meanwhile.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from typing import Any

MAX_SECONDS_PER_ANSWER = 5.0
MAX_MEMORY_BYTES = 6 << 30
HANDED_ON = {"code_tests", "http"}
"""Graders that run nothing here: a sandbox or a server gets the answer, and the tests of each are their own."""
WATCHED = {"os.system", "subprocess.Popen", "os.exec", "os.fork", "os.posix_spawn", "socket.connect", "socket.bind"}


def answers(canary: str) -> list[str]:
    """The answers; a call in one of them would make the file ``canary``."""
    return code(canary) + signs_and_sizes()


def code(canary: str) -> list[str]:
    touch = f"__import__('os').system('touch {canary}')"
    return [
        touch,
        f"eval({touch!r})",
        f"exec({touch!r})",
        f"open('{canary}', 'w')",
        f"[{touch}]",
        f"[x for x in [{touch}]]",
        f"(lambda: {touch})()",
        f"'{{}}'.format({touch})",
        f"f'{{{touch}}}'",
        f"().__class__.__base__.__subclasses__()[{touch}]",
        f"Symbol('x').__class__.__init__.__globals__['__builtins__']['open']('{canary}','w')",
        f"S('{touch}')",
        f"N({touch})",
        f"Integer({touch})",
        f"sympify({touch!r})",
        f"lambdify(x, {touch!r})",
        f"1 + {touch}",
        f"x**2 + {touch}",
        f"sin({touch})",
        f"1\n{touch}",
        f"x if {touch} else y",
        f"\\frac{{{touch}}}{{2}}",
        f"\\operatorname{{{touch}}}(x)",
        f"\\text{{{touch}}}",
        f"\\input{{{canary}}}",
        f"\\immediate\\write18{{touch {canary}}}",
        f"$(touch {canary})",
        f"`touch {canary}`",
        f"; touch {canary}",
        f"<script>touch('{canary}')</script>",
        f"!!python/object/apply:os.system ['touch {canary}']",
        f'{{"$ref": "file://{canary}"}}',
        f"cos\nsystem\n(S'touch {canary}'\ntR.",
    ]


def signs_and_sizes() -> list[str]:
    templates = [
        "{{ ''.__class__.__mro__ }}",
        "{% for x in range(10**9) %}{% endfor %}",
        "{0.__class__.__init__.__globals__}",
        "%(x)s %n %s %999999999d",
        "${7*7}",
        "{:>999999999}",
    ]
    signs = ["\x1b[2J\x1b]0;x\x07", "\x00", "1\x002", "\ud800", "\u202e12", "\u2028{}", "\ufffd" * 100, "١٢٣", "²"]
    sizes = [
        "9" * 200_000,
        "{" * 200_000,
        "}" * 200_000,
        "(" * 100_000 + "1" + ")" * 100_000,
        "[" * 100_000,
        '{"a":' * 20_000,
        "\\boxed{" * 100_000,
        "\\frac{" * 5_000 + "1" + "}{1}" * 5_000,
        "-" * 100_000 + "1",
        "1" + "+1" * 50_000,
        "a" * 50_000 + "!",
        "x^" * 2_000 + "x",
        "<answer>" * 50_000,
        "```json\n" * 20_000,
        "\\sqrt{" * 12 + "2" + "}" * 12,
    ]
    powers = [
        "9^{9^{9^{9}}}",
        "9**9**9**9",
        "9^9^9^9^9^9",
        "(9^{9^9},3)",
        "(((2)^{99})^{99})^{99}",
        "(((x+1)^{99})^{99})^{99}",
        "99999999999!",
        "((9!)!)!",
        "\\sum_{n=1}^{10^{10}} n!",
        "\\prod_{n=1}^{10^{10}} n",
        "1e999999999",
        "10^{-10^{10}}",
        "\\binom{10^9}{10^8}",
        "e^{e^{e^{99}}}",
        "(9**999)**999",
        "N(pi, 999999999)",
        "1<<999999999999",
        "\\int_0^1 x^{x^x} dx",
        "\\operatorname{zeros}(99999,99999)",
        "\\gcd(9^{9^9}, 3)",
    ]
    return templates + signs + sizes + powers


def labels() -> dict[str, list[Any]]:
    """A few usable labels for each grader."""
    from reasoning_gym.factory import create_dataset

    from unison.rewards.reasoning import EVALUATED, EVALUATED_ROWS

    rows = [
        {"dataset": name, "entry": create_dataset(name, seed=1, size=1)[0]}
        for name in sorted({*EVALUATED, *EVALUATED_ROWS, "base_conversion", "propositional_logic", "jugs"})
    ]
    return {
        "exact_answer": ["12"],
        "exact_match": ["12"],
        "f1": [["12", "twelve dogs"]],
        "format_tags": [None],
        "json_schema": [
            {"type": "object", "required": ["n"], "additionalProperties": {"type": "integer", "multipleOf": 3}}
        ],
        "math_answer": ["3", "(1,2)", "x^2+1"],
        "multiple_choice": ["B"],
        "reasoning_gym": rows,
    }


def wrapped(answer: str) -> list[str]:
    """The answer as a whole response, in a box, in tags and in a fence."""
    return [answer, f"\\boxed{{{answer}}}", f"<answer>{answer}</answer>", f"```json\n{answer}\n```"]


def main(canary: str) -> None:
    from unison.rewards.base import _registry

    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    of_grader = labels()
    graders = {name: _registry.find(name) for name in _registry.names if name not in HANDED_ON}
    missing = sorted(set(graders) - set(of_grader))
    for name, grader in graders.items():  # loads what they need, before the watch begins
        for label in of_grader.get(name, []):
            grader("<answer>1</answer> \\boxed{1+x}", label)
    raised: list[str] = []
    slow: list[str] = []
    right: list[str] = []
    asked: list[str] = []

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        if event in WATCHED or (event in ("open", "compile", "exec", "import") and canary in repr(arguments)[:2000]):
            asked.append(f"{event}: {repr(arguments)[:200]}")

    sys.addaudithook(watch)
    for answer in answers(canary):
        for name, grader in graders.items():
            for label in of_grader.get(name, []):
                start_s = time.process_time()
                for text in wrapped(answer):
                    try:
                        score = grader(text, label)
                    except Exception as error:
                        raised.append(f"{name}: {type(error).__name__}: {answer[:60]!r}: {str(error)[:80]}")
                        continue
                    if not 0.0 <= score < 1.0 and not (name == "f1" and score < 1):
                        right.append(f"{name}: {answer[:60]!r} for {str(label)[:40]}: {score}")
                if time.process_time() - start_s > MAX_SECONDS_PER_ANSWER:
                    slow.append(f"{name}: {answer[:60]!r}: {time.process_time() - start_s:.1f} s")
    print(json.dumps({"missing": missing, "raised": raised, "slow": slow, "right": right, "asked": asked}))


if __name__ == "__main__":
    main(sys.argv[1])
