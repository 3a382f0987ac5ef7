#!/usr/bin/env bash
# Train on GSM8K with three rewards: recipes/gsm8k/run.sh CONFIG [OVERRIDE...]
# Without CONFIG it lists the configurations. See README.md.
exec "$(dirname "${BASH_SOURCE[0]}")/../common/run.sh" gsm8k "$@"
