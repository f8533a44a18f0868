{{/* Names and labels. A name leaves room for every suffix that a controller or this chart adds to it. */}}

{{- define "midstream.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 48 | trimSuffix "-" -}}
{{- end -}}

{{/* At most 46 characters, for a Deployment adds up to 17 to it; a longer one keeps a digest of all of it, so that two never become one. */}}
{{- define "midstream.fullname" -}}
{{- $name := include "midstream.name" . -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- $full = default $full .Values.fullnameOverride -}}
{{- if gt (len $full) 46 -}}
{{- printf "%s-%s" ($full | trunc 37 | trimSuffix "-" | trimSuffix ".") (sha256sum $full | trunc 8) -}}
{{- else -}}
{{- $full -}}
{{- end -}}
{{- end -}}

{{- define "midstream.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "midstream.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "midstream.selector" -}}
app.kubernetes.io/name: {{ include "midstream.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "midstream.labels" -}}
{{ include "midstream.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 }}
{{- end -}}

{{- define "midstream.image" -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end -}}

{{- define "midstream.engineImage" -}}
{{- $tested := dict "vllm" (list "vllm/vllm-openai" "v0.25.1") "sglang" (list "lmsysorg/sglang" "v0.5.15") -}}
{{- $default := get $tested .Values.engine.kind -}}
{{ default (index $default 0) .Values.engine.image.repository }}:{{ default (index $default 1) .Values.engine.image.tag }}
{{- end -}}
