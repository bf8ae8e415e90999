"""Take trained drafters over into the package: `python pack.py RUNS`.

RUNS holds the run folders that the recipes beside this file name. The configurations of all stages that
made a drafter go with it as `training-STAGE.yaml`; each goes on from the one before. What is there from
earlier stages of another drafter is removed.
"""

import shutil
import sys
from pathlib import Path

from specdec_smollm2.trained import FOLDER, take_apart

RECIPES = Path(__file__).parent
STAGES = ("first", "second", "third", "fourth")

for kind in ("ar", "eagle2", "glide"):
    name = f"smollm2-135m-{kind}"
    stages = [stage for stage in STAGES if (RECIPES / stage / f"{kind}.yaml").exists()]
    for old in (FOLDER / name).glob("training-*.yaml"):
        old.unlink()
    take_apart(Path(sys.argv[1]) / stages[-1] / name / "drafter", FOLDER / name)
    for stage in stages:
        made = FOLDER / name / f"training-{stage}.yaml"
        shutil.copyfile(RECIPES / stage / f"{kind}.yaml", made)
    size = sum(path.stat().st_size for path in (FOLDER / name).iterdir())
    print(f"{FOLDER / name}: {size / 1e6:.1f} MB")
