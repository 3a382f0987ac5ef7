#!/usr/bin/env bash
# Train on mathematics with one reward: recipes/math/run.sh ARM [OVERRIDE...]; without an ARM it lists them. See README.md.
exec "$(dirname "${BASH_SOURCE[0]}")/../common/run.sh" math "$@"
