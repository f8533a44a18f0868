{{/* What lies in memory, and how long an end takes. Each answer is a whole number as text. */}}

{{/* Bytes of one arena (docs/formats.md): header, facts, slots, up to the next page, pages. */}}
{{- define "midstream.arenaBytes" -}}
{{- $slots := int64 (dig "arena" "slot_count" 256 .Values.config) -}}
{{- $pages := int64 (dig "arena" "page_count" 16384 .Values.config) -}}
{{- $head := add 69632 (mul $slots 512) -}}
{{- add (mul (div (add $head 4095) 4096) 4096) (mul $pages 4096) -}}
{{- end -}}

{{/* Of each engine: the arena in use, the one that is offered to its next start, and that of the start before. */}}
{{- define "midstream.arenasMiB" -}}
{{- $bytes := mul 3 (int64 .Values.engine.count) (int64 (include "midstream.arenaBytes" .)) -}}
{{- div (add $bytes 1048575) 1048576 -}}
{{- end -}}

{{/* The sidecar: it allocates the arenas, its mover fills tier 1, and it may keep other nodes' snapshots. */}}
{{- define "midstream.sidecarMiB" -}}
{{- $kept := add (int64 (dig "tier1" "bytes" 0 .Values.config)) (int64 (dig "replicas" "memory_bytes" 0 .Values.config)) -}}
{{- add (int64 .Values.sidecar.memoryMiB) (int64 (include "midstream.arenasMiB" .)) (div (add $kept 1048575) 1048576) -}}
{{- end -}}

{{/* The holder. After an engine's death its pool in host memory is the pod's, and the next engine may make another. */}}
{{- define "midstream.holderMiB" -}}
{{- if .Values.gpu.enabled -}}
64
{{- else -}}
{{- add 64 (mul 1024 (int64 .Values.engine.cpu.kvCacheGiB) (int64 .Values.engine.count)) -}}
{{- end -}}
{{- end -}}

{{/* After the drain: handlers, mover and holder have their time to end. */}}
{{- define "midstream.sidecarEndSeconds" -}}25{{- end -}}

{{/* Until the engines are told to end, counted from the beginning of the pod's end. */}}
{{- define "midstream.drainedSeconds" -}}
{{- add (int64 .Values.drain.delaySeconds) (int64 .Values.drain.deadlineSeconds) (int64 (include "midstream.sidecarEndSeconds" .)) -}}
{{- end -}}

{{/* A gateway has no engine that would have to wait for it. */}}
{{- define "midstream.gatewayGrace" -}}
{{- include "midstream.drainedSeconds" . -}}
{{- end -}}

{{- define "midstream.graceNeeded" -}}
{{- add (int64 (include "midstream.drainedSeconds" .)) (int64 .Values.engine.stopSeconds) -}}
{{- end -}}

{{- define "midstream.grace" -}}
{{- if kindIs "invalid" .Values.terminationGracePeriodSeconds -}}
{{- include "midstream.graceNeeded" . -}}
{{- else -}}
{{- int64 .Values.terminationGracePeriodSeconds -}}
{{- end -}}
{{- end -}}
