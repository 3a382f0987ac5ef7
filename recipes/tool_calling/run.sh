#!/usr/bin/env bash
# Train tool calling with two rewards: recipes/tool_calling/run.sh ARM [OVERRIDE...]; without an ARM it lists them. See README.md.
exec "$(dirname "${BASH_SOURCE[0]}")/../common/run.sh" tool_calling "$@"
