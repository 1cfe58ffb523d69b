"""The first import of the fork server in `forked`: of the others' million objects none is garbage, so none is looked for."""

import gc

gc.disable()
