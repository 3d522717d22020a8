#!/bin/sh
# For activation.ask_command: as many spot nodes as the learner asks for, by SkyPilot. Shows the shape; not run against a cloud.
set -eu
for i in $(seq "$SHOAL_MORE"); do
  sky launch --yes --detach-run --use-spot --gpus "${GPUS:-RTX4090:1}" --down --cluster "shoal-$(date +%s)-$i" \
    --env SHOAL_TICKET="$SHOAL_TICKET" "pip install shoal && shoal node --join \$SHOAL_TICKET --usd-per-hour ${USD_PER_HOUR:-0.4}"
done
