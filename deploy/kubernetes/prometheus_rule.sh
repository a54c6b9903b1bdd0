#!/usr/bin/env bash
# Prints the alerts of docker/prometheus/alerts.yml as a PrometheusRule, for the Prometheus operator:
#
#     deploy/kubernetes/prometheus_rule.sh | kubectl apply --filename -
set -euo pipefail

cat <<'END'
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: token2wav
spec:
END
sed 's/^/  /' "$(dirname "${BASH_SOURCE[0]}")/../../docker/prometheus/alerts.yml"
