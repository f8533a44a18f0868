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
{{- if .Values.store.enabled -}}
{{- /* What a folder has beyond its snapshots (names, half-written files) needs room, too. */ -}}
{{- $bytes := div (mul (int64 .Values.store.sizeGiB) 1073741824 9) 10 -}}
{{- $ours = set $ours "store" (dict "dir" "/var/lib/midstream/store" "bytes_max" $bytes) -}}
{{- end -}}
{{- $usual := dict "log" (dict "format" "json") -}}
{{- toYaml (mustMergeOverwrite $usual (deepCopy .Values.config) $ours) -}}
{{- end -}}
