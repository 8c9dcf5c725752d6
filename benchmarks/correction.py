"""Would it pay to re-predict doubtful proposals in the light of the ones before them? From recordings of bound.py.

    python benchmarks/correction.py --drafts drafts.jsonl --tuning tuning.json

The first proposal of a draft whose calibrated probability lies below a bound is doubtful. One more pass could run the
proposals before it as tokens, and masks behind them: a draft that has seen more. The recordings hold what such masks
say wherever the proposals before the doubtful one stood, since then they are the draft of a later token; where they did
not stand, nothing can be gained. Printed are the doubtful drafts, how far they stand as they are and corrected, and
what the rows of the extra pass would have to bring at the price of the best static setting.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bound import Recording

from bitmtp.decoding.costs import Tuning, sigmoid
from bitmtp.errors import BitMTPError

BOUNDS = (0.3, 0.5, 0.7, 0.9)


def doubtful(recording: Recording, at: int, tuning: Tuning, bound: float, size: int) -> int | None:
    """Place in the draft (2 or more) of the first proposal that is doubtful; None if none is."""
    calibration = tuning.calibration_at(recording.sampling.temperature)
    for place, output in enumerate(recording.drafts[at][:size]):
        if place and sigmoid(calibration.logit(place, output.probability)) < bound:
            return place if place > 1 else None
    return None


def report(recordings: list[Recording], tuning: Tuning, bound: float, size: int) -> None:
    """One line."""
    drafts = found = stands = corrected = rows = 0
    milliseconds = 0.0
    for recording in recordings:
        for at in range(len(recording.drafts)):
            drafts += 1
            place = doubtful(recording, at, tuning, bound, size)
            if place is None:
                continue
            found += 1
            before = min(recording.stands(at), size)
            anchor = at + place - 1
            stands += before
            reaches = before >= place - 1 and anchor < len(recording.drafts)
            corrected += min(max(place - 1 + recording.stands(anchor), before), size) if reaches else before
            rows += size
            milliseconds += tuning.costs.cost(size, len(recording.prompt) + at)
    share, found = found / drafts, max(found, 1)
    means = f"{stands / found:6.2f}  {corrected / found:9.2f}  {(corrected - stands) / found:6.2f}"
    print(f"{bound:5}  {share:8.0%}  {means}  {rows / found:5.1f}  {milliseconds / found:6.2f}")


def run(options: argparse.Namespace) -> None:
    """The table, and the price that it has to be compared with."""
    with Path(options.drafts).open(encoding="utf-8") as file:
        recordings = [Recording.from_json(line) for line in file]
    tuning = Tuning.from_json(Path(options.tuning).read_text(encoding="utf-8"))
    print("bound  doubtful  stands  corrected  gained   rows      ms")
    for bound in BOUNDS:
        report(recordings, tuning, bound, options.block_size)
    first = tuning.costs.milliseconds[0]
    print(f"the best static setting brings about {options.ratio / first:.2f} tokens a millisecond")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--drafts", required=True, help="what bound.py recorded")
    parser.add_argument("--tuning", required=True, help="costs and calibration, as depths.py writes them")
    parser.add_argument("--block-size", type=int, default=6)
    parser.add_argument(
        "--ratio", type=float, default=1.5, help="of the best static setting to autoregressive decoding"
    )
    return parser.parse_args()


if __name__ == "__main__":
    try:
        run(parse())
    except BitMTPError as error:
        sys.exit(f"correction: {error}")
