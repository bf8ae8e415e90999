"""Take trained drafters over into the package: `python pack.py RUNS`.

RUNS holds the run folders that the recipes beside this file name. Both configurations that made a
drafter go with it: `training-first.yaml`, and `training.yaml`, which went on from there.
"""

import shutil
import sys
from pathlib import Path

from specdec_smollm2.trained import FOLDER, take_apart

RECIPES = Path(__file__).parent

for kind in ("ar", "eagle2", "glide"):
    name = f"smollm2-135m-{kind}"
    take_apart(Path(sys.argv[1]) / name / "drafter", FOLDER / name)
    shutil.copyfile(RECIPES / "first" / f"{kind}.yaml", FOLDER / name / "training-first.yaml")
    shutil.copyfile(RECIPES / f"{kind}.yaml", FOLDER / name / "training.yaml")
    size = sum(path.stat().st_size for path in (FOLDER / name).iterdir())
    print(f"{FOLDER / name}: {size / 1e6:.1f} MB")
