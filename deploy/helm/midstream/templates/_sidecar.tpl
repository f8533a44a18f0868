{{/* The init containers: the holder and the sidecar, which stay, and one that brings the plugin and ends. */}}

{{- define "midstream.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: {{ . }}
capabilities:
  drop: [ALL]
{{- end -}}

{{- define "midstream.sidecarResources" -}}
{{- $memory := printf "%sMi" (include "midstream.sidecarMiB" .) -}}
{{- /* No limit of processor time: a stream that is throttled stands still. */ -}}
{{- $computed := dict "requests" (dict "cpu" .Values.sidecar.cpu "memory" $memory) "limits" (dict "memory" $memory) -}}
{{- if and .Values.gpu.enabled (eq .Values.gpu.access "claim") -}}
{{- $computed = set $computed "claims" (list (dict "name" "gpu")) -}}
{{- end -}}
{{- toYaml (mustMergeOverwrite $computed (deepCopy .Values.sidecar.resources)) -}}
{{- end -}}

{{- define "midstream.holderContainer" -}}
- name: holder
  image: {{ include "midstream.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  restartPolicy: Always
  command:
    - /bin/sh
    - -c
    - |
      {{- include "midstream.script.holder" . | nindent 6 }}
  startupProbe:
    exec:
      command: [test, -S, {{ include "midstream.stateDir" . }}/holder.sock]
    periodSeconds: 1
    failureThreshold: 60
  resources:
    requests:
      cpu: 10m
      memory: 64Mi
    limits:
      memory: {{ include "midstream.holderMiB" . }}Mi
  securityContext:
    {{- include "midstream.containerSecurity" true | nindent 4 }}
  volumeMounts:
    - name: run
      mountPath: {{ include "midstream.folder" . }}
{{- end -}}

{{- define "midstream.sidecarContainer" -}}
- name: midstream
  image: {{ include "midstream.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  restartPolicy: Always
  command:
    - /bin/sh
    - -c
    - |
      {{- include "midstream.script.sidecar" . | nindent 6 }}
  env:
    - name: HOME
      value: /tmp
    {{- if and .Values.gpu.enabled (eq .Values.gpu.access "visible-devices") }}
    # The mover finds the engines' GPUs among them by UUID, and takes none for itself.
    - name: NVIDIA_VISIBLE_DEVICES
      value: all
    - name: NVIDIA_DRIVER_CAPABILITIES
      value: compute,utility
    {{- end }}
    {{- if or .Values.fleet.secretName (ne .Values.fleet.coordination "none") }}
    - name: POD_IP
      valueFrom:
        fieldRef: {fieldPath: status.podIP}
    - name: POD_NAME
      valueFrom:
        fieldRef: {fieldPath: metadata.name}
    # Where gateways and other nodes reach this one; its host is also that of replicas.listen.
    - name: MIDSTREAM_FLEET_URL
      value: http://{{ include "midstream.podHost" . }}:{{ int64 .Values.sidecar.port }}
    {{- end }}
    {{- if include "midstream.watchesNode" . }}
    - name: MIDSTREAM_DRAIN_KUBERNETES_NODE
      valueFrom:
        fieldRef: {fieldPath: spec.nodeName}
    {{- end }}
    {{- with .Values.sidecar.env }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  ports:
    - name: http
      containerPort: {{ int64 .Values.sidecar.port }}
    {{- with include "midstream.replicasPort" . }}
    - name: replicas
      containerPort: {{ . }}
    {{- end }}
  startupProbe:
    exec:
      command:
        - /bin/sh
        - -c
        - |
          {{- include "midstream.script.offered" . | nindent 10 }}
    periodSeconds: 1
    failureThreshold: 120
  readinessProbe:
    httpGet:
      path: /readyz
      port: {{ int64 .Values.sidecar.port }}
    periodSeconds: 2
    timeoutSeconds: 2
    failureThreshold: 2
  livenessProbe:
    httpGet:
      path: /live
      port: {{ int64 .Values.sidecar.port }}
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: 6
    terminationGracePeriodSeconds: 10
  lifecycle:
    preStop:
      exec:
        command:
          - /bin/sh
          - -c
          - |
            {{- include "midstream.script.sidecarEnds" . | nindent 12 }}
  resources:
    {{- include "midstream.sidecarResources" . | nindent 4 }}
  securityContext:
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities:
      drop: [ALL]
      {{- if and .Values.gpu.enabled .Values.gpu.rescuePools }}
      # Not for what it permits: it is what the runtime's seccomp profile asks for before it lets pidfd_getfd through.
      add: [SYS_PTRACE]
      {{- end }}
  volumeMounts:
    - name: run
      mountPath: {{ include "midstream.folder" . }}
    - name: config
      mountPath: /etc/midstream
      readOnly: true
    - name: sidecar-tmp
      mountPath: /tmp
    {{- if .Values.store.enabled }}
    - name: store
      mountPath: /var/lib/midstream
    {{- end }}
    {{- include "midstream.secretMount" . | nindent 4 }}
    {{- include "midstream.tokenMount" . | nindent 4 }}
    {{- with .Values.sidecar.volumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* The engine's image has no midstream: it finds the plugin in a folder of the pod. */}}
{{- define "midstream.pluginContainer" -}}
- name: plugin
  image: {{ include "midstream.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: [cp, -R, /opt/midstream-plugin/., /plugin/]
  resources:
    requests:
      cpu: 10m
      memory: 32Mi
    limits:
      memory: 64Mi
  securityContext:
    {{- include "midstream.containerSecurity" true | nindent 4 }}
  volumeMounts:
    - name: plugin
      mountPath: /plugin
{{- end -}}
