#!/usr/bin/env bash
# Train one arm without a GPU: recipes/turns/run.sh ARM [OVERRIDE...]; without an ARM it lists them. See README.md.
exec "$(dirname "${BASH_SOURCE[0]}")/../common/run.sh" turns "$@"
