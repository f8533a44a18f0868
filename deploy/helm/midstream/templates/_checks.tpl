{{/* What a schema cannot say: values that do not go together. Fact, then remedy. */}}

{{- define "midstream.checks" -}}
{{- if not .Values.image.repository -}}
{{- fail "image.repository is empty; build the image of midstream from deploy/Dockerfile, push it, and name it there" -}}
{{- end -}}
{{- if and (not .Values.engine.model) (not .Values.engine.command) -}}
{{- fail "engine.model is empty; name a model, or the engine's whole command in engine.command" -}}
{{- end -}}
{{- if and (not .Values.gpu.enabled) (not .Values.engine.image.repository) -}}
{{- fail "gpu.enabled is false, and the engine's usual image is made for GPUs; name one for CPUs in engine.image" -}}
{{- end -}}
{{- if and .Values.gpu.enabled (eq .Values.gpu.access "claim") (not .Values.gpu.claimTemplate) -}}
{{- fail "gpu.access is claim and gpu.claimTemplate is empty; name a ResourceClaimTemplate of this namespace" -}}
{{- end -}}
{{- $needed := int64 (include "midstream.graceNeeded" .) -}}
{{- $grace := int64 (include "midstream.grace" .) -}}
{{- if lt $grace $needed -}}
{{- fail (printf "terminationGracePeriodSeconds is %d, and the end of a pod takes up to %d s: drain.delaySeconds %d + drain.deadlineSeconds %d + %s for the sidecar + engine.stopSeconds %d; answers would be cut off. Raise it (or leave it out), or lower drain.deadlineSeconds" $grace $needed (int64 .Values.drain.delaySeconds) (int64 .Values.drain.deadlineSeconds) (include "midstream.sidecarEndSeconds" .) (int64 .Values.engine.stopSeconds)) -}}
{{- end -}}
{{- range .Values.engine.args -}}
{{- $flag := index (splitList "=" (toString .)) 0 -}}
{{- if has $flag (list "--port" "--host") -}}
{{- fail (printf "engine.args has %s, which the chart sets: engines listen on loopback, from engine.port on; clients reach the sidecar" $flag) -}}
{{- end -}}
{{- if eq $flag "--kv-transfer-config" -}}
{{- fail "engine.args has --kv-transfer-config, which the chart sets; two connectors in one engine are not supported" -}}
{{- end -}}
{{- if has $flag (list "--data-parallel-size" "-dp" "--dp-size" "--dp") -}}
{{- fail (printf "engine.args has %s, and sessions of several engines behind one port cannot be told apart; use engine.count" $flag) -}}
{{- end -}}
{{- end -}}
{{- if and (eq .Values.fleet.coordination "kubernetes") (not .Values.serviceAccount.create) (not .Values.serviceAccount.name) -}}
{{- fail "fleet.coordination is kubernetes and there is no service account to give its role to; set serviceAccount.create or serviceAccount.name" -}}
{{- end -}}
{{- if and (include "midstream.watchesNode" .) (not .Values.serviceAccount.create) (not .Values.serviceAccount.name) -}}
{{- fail "config.drain.notices has kubernetes and there is no service account that could read nodes; set serviceAccount.create or serviceAccount.name" -}}
{{- end -}}
{{- if and .Values.gateway.enabled (not .Values.fleet.secretName) -}}
{{- fail "gateway.enabled needs the secret of the fleet, by which nodes know their gateways: make one (kubectl create secret generic NAME --from-literal=secret=\"$(openssl rand -hex 32)\") and name it in fleet.secretName" -}}
{{- end -}}
{{- if and .Values.gateway.enabled (lt (int64 .Values.replicas) 1) -}}
{{- fail "gateway.enabled and replicas is 0: a gateway needs nodes; raise replicas" -}}
{{- end -}}
{{- range $name := list "listen" "tls_cert" "tls_key" "tls_ca" -}}
{{- if dig "fleet" $name "" $.Values.config -}}
{{- fail (printf "config.fleet.%s is set, and the chart has gateways and nodes reach each other by plain HTTP, which is signed and not encrypted: TLS between them is not supported here yet. Leave it out, and keep their network a private one" $name) -}}
{{- end -}}
{{- end -}}
{{- $replicasPort := include "midstream.replicasPort" . -}}
{{- if $replicasPort -}}
{{- $listen := dig "replicas" "listen" "" .Values.config -}}
{{- if not (regexMatch "^(0\\.0\\.0\\.0|::|\\[::\\]):[0-9]+$" $listen) -}}
{{- fail (printf "config.replicas.listen is %s, one address for all pods; listen on 0.0.0.0:PORT ([::]:PORT with IPv6 only), and each is known by its name" $listen) -}}
{{- end -}}
{{- range $name := list "tls_cert" "tls_key" "tls_ca" -}}
{{- if not (dig "replicas" $name "" $.Values.config) -}}
{{- fail (printf "config.replicas.listen needs certificates, and config.replicas.%s is empty: mount a Secret with one for *.%s-pods.%s.svc (volumes, sidecar.volumeMounts) and name its files in config.replicas.tls_cert, tls_key and tls_ca" $name (include "midstream.fullname" $) $.Release.Namespace) -}}
{{- end -}}
{{- end -}}
{{- if eq (int64 $replicasPort) (int64 .Values.sidecar.port) -}}
{{- fail (printf "config.replicas.listen has the port of sidecar.port, %s; containers of a pod share their ports" $replicasPort) -}}
{{- end -}}
{{- range until (int .Values.engine.count) -}}
{{- if eq (int64 $replicasPort) (add (int64 $.Values.engine.port) .) -}}
{{- fail (printf "config.replicas.listen has the port of engine-%d, %s; containers of a pod share their ports" . $replicasPort) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if gt (add (int64 .Values.engine.port) (int64 .Values.engine.count)) 65536 -}}
{{- fail "engine.port is too high for so many engines; lower it" -}}
{{- end -}}
{{- range until (int .Values.engine.count) -}}
{{- if eq (int64 $.Values.sidecar.port) (add (int64 $.Values.engine.port) .) -}}
{{- fail (printf "sidecar.port %d is also the port of engine-%d; containers of a pod share their ports" (int64 $.Values.sidecar.port) .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
