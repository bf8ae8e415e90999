"""Take trained drafters over into the package: `python pack.py RUNS`.

RUNS holds the run folders that the recipes beside this file name. The configurations of all stages that
made a drafter go with it: `training-first.yaml`, `training-second.yaml`, which went on from there, and so on.
"""

import shutil
import sys
from pathlib import Path

from specdec_smollm2.trained import FOLDER, take_apart

RECIPES = Path(__file__).parent

for kind in ("ar", "eagle2", "glide"):
    name = f"smollm2-135m-{kind}"
    stages = [
        stage
        for stage in ("first", "second", "third")
        if (RECIPES / stage / f"{kind}.yaml").exists()
    ]
    take_apart(Path(sys.argv[1]) / stages[-1] / name / "drafter", FOLDER / name)
    for stage in stages:
        made = FOLDER / name / f"training-{stage}.yaml"
        shutil.copyfile(RECIPES / stage / f"{kind}.yaml", made)
    size = sum(path.stat().st_size for path in (FOLDER / name).iterdir())
    print(f"{FOLDER / name}: {size / 1e6:.1f} MB")
