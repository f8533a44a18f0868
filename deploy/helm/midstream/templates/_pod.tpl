{{/* The pod, whichever controller makes it. */}}

{{- define "midstream.podTemplate" -}}
metadata:
  labels:
    {{- include "midstream.labels" . | nindent 4 }}
    app.kubernetes.io/component: node
    {{- with .Values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    # Settings are read at the start: others need other pods.
    midstream/config-digest: {{ include "midstream.config" . | sha256sum }}
    kubectl.kubernetes.io/default-container: engine-0
    {{- with .Values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "midstream.serviceAccount" . }}
  # The engine gets no credentials of the cluster's; the sidecar only where it needs them.
  automountServiceAccountToken: false
  # Variables of other services are none of midstream's or the engine's settings.
  enableServiceLinks: false
  # Who an engine is, and whether all of it is gone, is told by its processes.
  shareProcessNamespace: true
  terminationGracePeriodSeconds: {{ include "midstream.grace" . }}
  {{- if and .Values.gpu.enabled .Values.gpu.runtimeClassName }}
  runtimeClassName: {{ .Values.gpu.runtimeClassName }}
  {{- end }}
  {{- include "midstream.everyPod" . | nindent 2 }}
  initContainers:
    {{- include "midstream.holderContainer" . | nindent 4 }}
    {{- include "midstream.sidecarContainer" . | nindent 4 }}
    {{- include "midstream.pluginContainer" . | nindent 4 }}
  containers:
    {{- range $index := until (int .Values.engine.count) }}
    {{- include "midstream.engine" (list $ $index) | nindent 4 }}
    {{- end }}
  {{- if and .Values.gpu.enabled (eq .Values.gpu.access "claim") }}
  resourceClaims:
    - name: gpu
      resourceClaimTemplateName: {{ .Values.gpu.claimTemplate }}
  {{- end }}
  volumes:
    {{- include "midstream.volumes" . | nindent 4 }}
  {{- with .Values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}

{{/* What holds for nodes and gateways. */}}
{{- define "midstream.everyPod" -}}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  {{- if not (kindIs "invalid" .Values.podSecurity.user) }}
  runAsUser: {{ int64 .Values.podSecurity.user }}
  {{- end }}
  {{- if not (kindIs "invalid" .Values.podSecurity.group) }}
  runAsGroup: {{ int64 .Values.podSecurity.group }}
  fsGroup: {{ int64 .Values.podSecurity.group }}
  fsGroupChangePolicy: OnRootMismatch
  {{- end }}
  seccompProfile:
    type: RuntimeDefault
{{- end -}}

{{- define "midstream.volumes" -}}
# Arenas, lifelines and sockets; pools and tier 1 are memory without a file, and count for the containers' limits alone.
- name: run
  emptyDir:
    medium: Memory
    sizeLimit: {{ add 16 (int64 (include "midstream.arenasMiB" .)) }}Mi
- name: plugin
  emptyDir:
    sizeLimit: 64Mi
- name: sidecar-tmp
  emptyDir:
    sizeLimit: 256Mi
- name: config
  configMap:
    name: {{ include "midstream.fullname" . }}
- name: cache
  {{- if .Values.engine.cache.existingClaim }}
  persistentVolumeClaim:
    claimName: {{ .Values.engine.cache.existingClaim }}
  {{- else }}
  emptyDir:
    sizeLimit: {{ .Values.engine.cache.size }}
  {{- end }}
{{- range $index := until (int .Values.engine.count) }}
- name: engine-{{ $index }}-shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ $.Values.engine.shmSize }}
- name: engine-{{ $index }}-tmp
  emptyDir: {}
{{- end }}
{{- if and .Values.store.enabled (not .Values.store.persistent) }}
- name: store
  emptyDir:
    sizeLimit: {{ int64 .Values.store.sizeGiB }}Gi
{{- end }}
{{- include "midstream.secretVolume" . }}
{{- include "midstream.tokenVolume" . }}
{{- with .Values.volumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* By which nodes believe gateways. */}}
{{- define "midstream.secretVolume" -}}
{{- if .Values.fleet.secretName }}
- name: fleet-secret
  secret:
    secretName: {{ .Values.fleet.secretName }}
    # r--r-----, for the pod's group: midstream takes no secret that everybody may read. Not every YAML has octals.
    defaultMode: 288
    items:
      - key: {{ .Values.fleet.secretKey }}
        path: secret
{{- end }}
{{- end -}}

{{- define "midstream.secretMount" -}}
{{- if .Values.fleet.secretName }}
- name: fleet-secret
  mountPath: /etc/midstream-fleet
  readOnly: true
{{- end }}
{{- end -}}

{{/* With which sidecars and gateways prove themselves to the API, as its clients look for it. */}}
{{- define "midstream.tokenVolume" -}}
{{- if or (eq .Values.fleet.coordination "kubernetes") (include "midstream.watchesNode" .) }}
- name: token
  projected:
    sources:
      - serviceAccountToken:
          path: token
          expirationSeconds: 3600
      - configMap:
          name: kube-root-ca.crt
          items:
            - key: ca.crt
              path: ca.crt
      - downwardAPI:
          items:
            - path: namespace
              fieldRef: {fieldPath: metadata.namespace}
{{- end }}
{{- end -}}

{{- define "midstream.tokenMount" -}}
{{- if or (eq .Values.fleet.coordination "kubernetes") (include "midstream.watchesNode" .) }}
- name: token
  mountPath: /var/run/secrets/kubernetes.io/serviceaccount
  readOnly: true
{{- end }}
{{- end -}}
