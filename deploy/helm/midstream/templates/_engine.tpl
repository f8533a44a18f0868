{{/* One engine: its command, beside a sidecar that did not start it (docs/vllm.md, docs/sglang.md: Attach). */}}

{{- define "midstream.engineCommand" -}}
{{- if .Values.engine.command -}}
{{- toYaml .Values.engine.command -}}
{{- else if eq .Values.engine.kind "vllm" -}}
{{- toYaml (list "vllm" "serve" .Values.engine.model) -}}
{{- else -}}
{{- toYaml (list "python3" "-m" "sglang.launch_server" "--model-path" .Values.engine.model) -}}
{{- end -}}
{{- end -}}

{{- define "midstream.engineArgs" -}}
{{- $root := index . 0 -}}
{{- $port := index . 1 -}}
{{- $args := list "--host" "127.0.0.1" "--port" (toString $port) -}}
{{- $given := list -}}
{{- range $root.Values.engine.args -}}
{{- $given = append $given (toString .) -}}
{{- end -}}
{{- $flags := list -}}
{{- range $given -}}
{{- $flags = append $flags (index (splitList "=" .) 0) -}}
{{- end -}}
{{- if eq $root.Values.engine.kind "vllm" -}}
{{- $connector := dict "kv_connector" "MidstreamConnector" "kv_connector_module_path" "midstream.adapters.vllm.connector" "kv_role" "kv_both" "kv_load_failure_policy" "recompute" -}}
{{- $args = concat $args (list "--kv-transfer-config" (toJson $connector)) -}}
{{- else -}}
{{- if not (has "--page-size" $flags) -}}
{{- $args = concat $args (list "--page-size" "64") -}}
{{- end -}}
{{- end -}}
{{- toYaml (concat $args $given) -}}
{{- end -}}

{{- define "midstream.engineEnv" -}}
{{- $root := index . 0 -}}
{{- $name := index . 1 -}}
- name: MIDSTREAM_STATE_DIR
  value: {{ include "midstream.stateDir" $root }}
- name: MIDSTREAM_WORKER
  value: {{ $name }}
- name: PYTHONPATH
  value: {{ printf "/opt/midstream-plugin%s" (ternary (printf ":%s" $root.Values.engine.pythonPath) "" (ne $root.Values.engine.pythonPath "")) }}
- name: HOME
  value: /home/engine
# Some libraries ask who they are, and fail where the image has no name for the user.
- name: USER
  value: engine
- name: LOGNAME
  value: engine
{{- if eq $root.Values.engine.kind "sglang" }}
- name: SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION
  value: "false"
{{- end }}
{{- if not $root.Values.gpu.enabled }}
{{- if eq $root.Values.engine.kind "vllm" }}
- name: VLLM_CPU_KVCACHE_SPACE
  value: {{ $root.Values.engine.cpu.kvCacheGiB | int64 | quote }}
{{- else }}
- name: SGLANG_USE_CPU_ENGINE
  value: "1"
{{- end }}
{{- end }}
{{- with $root.Values.engine.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "midstream.engineResources" -}}
{{- $computed := dict -}}
{{- if not .Values.gpu.enabled -}}
{{- $memory := printf "%dGi" (add (int64 .Values.engine.cpu.kvCacheGiB) (int64 .Values.engine.cpu.otherGiB)) -}}
{{- $computed = dict "requests" (dict "memory" $memory) "limits" (dict "memory" $memory) -}}
{{- else if eq .Values.gpu.access "claim" -}}
{{- $computed = dict "claims" (list (dict "name" "gpu")) -}}
{{- else -}}
{{- $computed = dict "limits" (dict .Values.gpu.resourceName (int64 .Values.gpu.perEngine)) -}}
{{- end -}}
{{- toYaml (mustMergeOverwrite $computed (deepCopy .Values.engine.resources)) -}}
{{- end -}}

{{- define "midstream.engine" -}}
{{- $root := index . 0 -}}
{{- $index := index . 1 -}}
{{- $name := printf "engine-%d" $index -}}
{{- $port := add (int64 $root.Values.engine.port) $index -}}
- name: {{ $name }}
  image: {{ include "midstream.engineImage" $root }}
  imagePullPolicy: {{ $root.Values.engine.image.pullPolicy }}
  command:
    {{- include "midstream.engineCommand" $root | nindent 4 }}
  args:
    {{- include "midstream.engineArgs" (list $root $port) | nindent 4 }}
  env:
    {{- include "midstream.engineEnv" (list $root $name) | nindent 4 }}
  {{- with $root.Values.engine.envFrom }}
  envFrom:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  # No readiness of its own: the sidecar's says whether any engine serves. A pod whose other engine loads is ready.
  {{- if $root.Values.engine.liveness }}
  livenessProbe:
    exec:
      command:
        - python3
        - -ISc
        - |
          {{- include "midstream.script.alive" $root | nindent 10 }}
        - {{ $port | quote }}
    initialDelaySeconds: {{ int64 $root.Values.engine.startSeconds }}
    periodSeconds: 30
    timeoutSeconds: 15
    failureThreshold: 4
    # One that hangs ends by SIGKILL only; its sessions have gone on elsewhere, or wait for its next start.
    terminationGracePeriodSeconds: 10
  {{- end }}
  lifecycle:
    preStop:
      exec:
        command:
          - /bin/sh
          - -c
          - |
            {{- include "midstream.script.engineEnds" $root | nindent 12 }}
  resources:
    {{- include "midstream.engineResources" $root | nindent 4 }}
  securityContext:
    {{- include "midstream.containerSecurity" $root.Values.engine.readOnlyRootFilesystem | nindent 4 }}
  volumeMounts:
    - name: run
      mountPath: {{ include "midstream.folder" $root }}
    - name: plugin
      mountPath: /opt/midstream-plugin
      readOnly: true
    - name: cache
      mountPath: /home/engine
    - name: {{ $name }}-shm
      mountPath: /dev/shm
    - name: {{ $name }}-tmp
      mountPath: /tmp
    {{- with $root.Values.engine.volumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}
