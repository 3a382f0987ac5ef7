#!/usr/bin/env bash
# Train on mathematics with one reward: recipes/math/run.sh CONFIG [OVERRIDE...]
# Without CONFIG it lists the configurations. See README.md.
exec "$(dirname "${BASH_SOURCE[0]}")/../common/run.sh" math "$@"
