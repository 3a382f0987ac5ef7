#!/usr/bin/env bash
# Train one configuration without a GPU: recipes/quickstart/run.sh CONFIG [OVERRIDE...]
# Without CONFIG it lists the configurations. See README.md.
exec "$(dirname "${BASH_SOURCE[0]}")/../common/run.sh" quickstart "$@"
