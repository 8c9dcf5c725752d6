"""The tasks by name. A new one is a :class:`Task` in a file of its own, and a line here."""

from bitmtp.evaluation.arithmetic import GSM8K, MATH500
from bitmtp.evaluation.code import HUMANEVAL, MBPP
from bitmtp.evaluation.ifeval import IFEVAL
from bitmtp.evaluation.task import Task

TASKS: dict[str, Task] = {task.name: task for task in (IFEVAL, GSM8K, MATH500, HUMANEVAL, MBPP)}
