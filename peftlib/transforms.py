"""The package `transforms` by a name that nobody else's folder has.

`from peftlib import transforms` gives the very modules that `import transforms`
gives. In an installed wheel it does so too where a folder of the user's own is
called `transforms`, which `import transforms` would find.
"""

import importlib
import pkgutil
import sys

import transforms
from transforms import *  # noqa: F403  For type checkers.

# Before anybody asks for one of them by this name, for which Python would load
# it a second time.
for _module in pkgutil.iter_modules(transforms.__path__):
  sys.modules[f'{__name__}.{_module.name}'] = importlib.import_module(
    f'transforms.{_module.name}'
  )
sys.modules[__name__] = transforms
