{{/* The file midstream.yaml: what may be overridden, the values' own settings, and what only the chart can know. */}}

{{- define "midstream.folder" -}}/run/midstream{{- end -}}
{{- define "midstream.stateDir" -}}{{ include "midstream.folder" . }}/state{{- end -}}

{{- define "midstream.config" -}}
{{- $workers := list -}}
{{- range $index := until (int .Values.engine.count) -}}
{{- $url := printf "http://127.0.0.1:%d" (add (int64 $.Values.engine.port) $index) -}}
{{- $workers = append $workers (dict "name" (printf "engine-%d" $index) "url" $url) -}}
{{- end -}}
{{- $ours := dict
      "state_dir" (include "midstream.stateDir" .)
      "workers" $workers
      "listen" (dict "host" .Values.sidecar.listenHost "port" (int64 .Values.sidecar.port))
      "supervise" (dict "stop_timeout_s" (int64 .Values.drain.deadlineSeconds)) -}}
{{- $ours = mustMergeOverwrite $ours (include "midstream.fleetConfig" . | fromYaml) -}}
{{- if .Values.store.enabled -}}
{{- /* What a folder has beyond its snapshots (names, half-written files) needs room, too. */ -}}
{{- $bytes := div (mul (int64 .Values.store.sizeGiB) 1073741824 9) 10 -}}
{{- $ours = set $ours "store" (dict "dir" "/var/lib/midstream/store" "bytes_max" $bytes) -}}
{{- end -}}
{{- $usual := dict "log" (dict "format" "json") -}}
{{- toYaml (mustMergeOverwrite $usual (deepCopy .Values.config) $ours) -}}
{{- end -}}

{{/* What nodes and gateways of a release have in common. */}}
{{- define "midstream.fleetConfig" -}}
{{- $fleet := dict "coordination" .Values.fleet.coordination "group" (default (include "midstream.fullname" .) .Values.fleet.group) -}}
{{- if .Values.fleet.secretName -}}
{{- $fleet = set $fleet "secret_file" "/etc/midstream-fleet/secret" -}}
{{- end -}}
{{- toYaml (dict "fleet" $fleet) -}}
{{- end -}}

{{/* The gateways' file: the same settings, and the nodes by the names of their pods where no service tells of them. */}}
{{- define "midstream.gatewayConfig" -}}
{{- $full := include "midstream.fullname" . -}}
{{- $nodes := list -}}
{{- range $index := until (int .Values.replicas) -}}
{{- $nodes = append $nodes (printf "%s-%d=http://%s-%d.%s-pods:%d" $full $index $full $index $full (int64 $.Values.sidecar.port)) -}}
{{- end -}}
{{- $ours := dict
      "listen" (dict "host" .Values.sidecar.listenHost "port" (int64 .Values.sidecar.port))
      "supervise" (dict "stop_timeout_s" (int64 .Values.drain.deadlineSeconds)) -}}
{{- $ours = mustMergeOverwrite $ours (include "midstream.fleetConfig" . | fromYaml) -}}
{{- if eq .Values.fleet.coordination "none" -}}
{{- $ours = set $ours "gateway" (dict "nodes" (join "," $nodes)) -}}
{{- end -}}
{{- $usual := dict "log" (dict "format" "json") -}}
{{- toYaml (mustMergeOverwrite $usual (deepCopy .Values.config) $ours) -}}
{{- end -}}
