{{/* Names and labels. A name leaves room for every suffix that a controller or this chart adds to it. */}}

{{- define "midstream.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 48 | trimSuffix "-" -}}
{{- end -}}

{{/*
A name that a service may have: letters, digits and dashes, a letter first, at most 38 characters: this chart adds up to 8
to it and a Deployment 17. Whatever had to be changed for that keeps a digest of what it was, so that two names never become one.
*/}}
{{- define "midstream.fullname" -}}
{{- $name := include "midstream.name" . -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- $full = default $full .Values.fullnameOverride -}}
{{- $safe := replace "." "-" $full -}}
{{- if regexMatch "^[0-9]" $safe -}}
{{- $safe = printf "m-%s" $safe -}}
{{- end -}}
{{- if or (ne $safe $full) (gt (len $safe) 38) -}}
{{- printf "%s-%s" ($safe | trunc 29 | trimSuffix "-") (sha256sum $full | trunc 8) -}}
{{- else -}}
{{- $safe -}}
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

{{- define "midstream.nodeSelector" -}}
{{ include "midstream.selector" . }}
app.kubernetes.io/component: node
{{- end -}}

{{- define "midstream.gatewaySelector" -}}
{{ include "midstream.selector" . }}
app.kubernetes.io/component: gateway
{{- end -}}

{{/*
A store of its own for each pod, gateways that know pods by nothing but their names, and certificates, which are made out
to names, need names that stay.
*/}}
{{- define "midstream.namesStay" -}}
{{- $byName := and .Values.gateway.enabled (eq .Values.fleet.coordination "none") -}}
{{- if or $byName (and .Values.store.enabled .Values.store.persistent) (include "midstream.replicasPort" .) -}}true{{- end -}}
{{- end -}}

{{/* Where a pod keeps others' snapshots, if it does: config.replicas.listen beyond loopback. */}}
{{- define "midstream.replicasPort" -}}
{{- $listen := dig "replicas" "listen" "" .Values.config -}}
{{- if and $listen (not (regexMatch "^(127\\.|localhost:|\\[?::1\\]?:)" $listen)) -}}
{{- regexFind "[0-9]+$" $listen -}}
{{- end -}}
{{- end -}}

{{/* The host under which others reach a pod: its address, or the name that its certificate has. */}}
{{- define "midstream.podHost" -}}
{{- if include "midstream.replicasPort" . -}}
$(POD_NAME).{{ include "midstream.fullname" . }}-pods.{{ .Release.Namespace }}.svc
{{- else -}}
{{ contains ":" .Values.sidecar.listenHost | ternary "[$(POD_IP)]" "$(POD_IP)" }}
{{- end -}}
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

{{/* "true" where sidecars watch the node object of their pod (config.drain.notices). */}}
{{- define "midstream.watchesNode" -}}
{{- if has "kubernetes" (splitList "," (dig "drain" "notices" "" .Values.config)) -}}true{{- end -}}
{{- end -}}
