#!/bin/sh
# For activation.ask_command: as many spot nodes as the learner asks for, by SkyPilot. Shows the shape; not run against a cloud.
# SHOAL_SOURCE is what pip installs Shoal from (a wheel, a git URL): it is on no package index.
set -eu
: "${SHOAL_SOURCE:?what pip installs Shoal from}"
for i in $(seq "$SHOAL_MORE"); do
  sky launch --yes --detach-run --use-spot --gpus "${GPUS:-RTX4090:1}" --down --cluster "shoal-$(date +%s)-$i" \
    --env SHOAL_TICKET="$SHOAL_TICKET" "pip install $SHOAL_SOURCE && shoal node --usd-per-hour ${USD_PER_HOUR:-0.4}"
done
