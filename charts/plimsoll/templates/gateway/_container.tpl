{{/* What the gateway's containers have in common. */}}

{{/* Security, resources and mounts. Call with (dict "root" $ "resources" RESOURCES "api" WHETHER-IT-IS-THE-PICKER). The
picker alone calls the API server, and reads the certificate and the secret of all gateways. */}}
{{- define "plimsoll.gateway.container" -}}
{{- with .resources -}}
resources:
  {{- toYaml . | nindent 2 }}
{{ end -}}
{{- with .root.Values.securityContext -}}
securityContext:
  {{- toYaml . | nindent 2 }}
{{ end -}}
volumeMounts:
  - {name: run, mountPath: /run/plimsoll}
  - {name: tmp, mountPath: /tmp}
{{- if and .api (eq (include "plimsoll.gateway.scheme" .root) "https") }}
  - {name: tls, mountPath: {{ include "plimsoll.gateway.tlsDirectory" .root }}, readOnly: true}
{{- end }}
{{- if and .api (include "plimsoll.internalTlsSecret" .root) }}
  - {name: internal-tls, mountPath: {{ include "plimsoll.internalTlsDirectory" .root }}, readOnly: true}
{{- end }}
{{- if .api }}
  - {name: peers, mountPath: {{ include "plimsoll.gateway.peerDirectory" .root }}, readOnly: true}
  - {name: api, mountPath: /var/run/secrets/kubernetes.io/serviceaccount, readOnly: true}
{{- with include "plimsoll.gateway.endpointPicker" .root | fromYaml }}
{{- if and .enabled .tls.secretName }}
  - {name: endpoint-picker, mountPath: /etc/plimsoll-endpoint-picker, readOnly: true}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Where the picker finds the certificate. */}}
{{- define "plimsoll.gateway.tlsDirectory" -}}
/etc/plimsoll-gateway-tls
{{- end }}

{{/* Where the picker finds the secret of all gateways. */}}
{{- define "plimsoll.gateway.peerDirectory" -}}
/etc/plimsoll-gateway-peers
{{- end }}

{{/* The gateway's pods as a label selector: KEY=VALUE,KEY=VALUE. */}}
{{- define "plimsoll.gateway.podSelector" -}}
{{ include "plimsoll.selector" (dict "root" . "component" "gateway") | replace ": " "=" | replace "\n" "," }}
{{- end }}

{{/* Settings of the picker. */}}
{{- define "plimsoll.gateway.env" -}}
- {name: PLIMSOLL_GATEWAY_DIR, value: /run/plimsoll}
- {name: PLIMSOLL_GATEWAY_PORT, value: "8080"}
- {name: PLIMSOLL_PICKER_PORT, value: "8081"}
- {name: PLIMSOLL_WATCH_NAMESPACES, value: {{ join "," .Values.watchNamespaces | quote }}}
- {name: PLIMSOLL_MAX_BODY_BYTES, value: {{ int64 .Values.gateway.maxBodyBytes | quote }}}
{{- with .Values.gateway.connectionsPerSource }}
- {name: PLIMSOLL_CONNECTIONS_PER_SOURCE, value: {{ int64 . | quote }}}
{{- end }}
- name: PLIMSOLL_ENVOY_MEMORY_BYTES
  valueFrom: {resourceFieldRef: {containerName: envoy, resource: limits.memory}}
- {name: PLIMSOLL_API_KEYS, value: {{ include "plimsoll.gateway.apiKeys" . }}}
{{- with include "plimsoll.gateway.jwtIssuers" . }}
{{- if ne . "[]" }}
- {name: PLIMSOLL_JWT_ISSUERS, value: {{ . | quote }}}
{{- end }}
{{- end }}
- {name: PLIMSOLL_TRUST_IDENTITY_HEADERS, value: {{ default false .Values.gateway.trustIdentityHeaders | quote }}}
- {name: PLIMSOLL_CLASS_HEADER, value: {{ .Values.gateway.classHeader | quote }}}
- {name: PLIMSOLL_TENANT_HEADER, value: {{ .Values.gateway.tenantHeader | quote }}}
- {name: PLIMSOLL_CORS_ALLOWED_ORIGINS, value: {{ join "," .Values.gateway.corsAllowedOrigins | quote }}}
{{- with include "plimsoll.gateway.tls" . | fromYaml }}
{{- if .secretName }}
- {name: PLIMSOLL_TLS_DIR, value: {{ include "plimsoll.gateway.tlsDirectory" $ }}}
- {name: PLIMSOLL_TLS_MIN_VERSION, value: {{ .minVersion }}}
- {name: PLIMSOLL_TLS_PLAINTEXT, value: {{ .plaintext }}}
{{- end }}
{{- end }}
{{- if include "plimsoll.internalTlsSecret" . }}
- {name: PLIMSOLL_INTERNAL_TLS_DIR, value: {{ include "plimsoll.internalTlsDirectory" . }}}
- {name: PLIMSOLL_PROBE_PORT, value: "8083"}
{{- end }}
- {name: PLIMSOLL_ACCESS_LOG, value: {{ default false (default dict .Values.gateway.accessLog).enabled | quote }}}
{{- with include "plimsoll.traces" . | fromYaml }}
- {name: PLIMSOLL_TRACES_ENDPOINT, value: {{ .endpoint | quote }}}
- {name: PLIMSOLL_TRACES_SAMPLING, value: {{ .samplingRate | quote }}}
{{- end }}
- {name: PLIMSOLL_GATEWAY_SELECTOR, value: {{ include "plimsoll.gateway.podSelector" . | quote }}}
- {name: PLIMSOLL_PEER_PORT, value: "8082"}
- {name: PLIMSOLL_PEER_SECRET_FILE, value: {{ include "plimsoll.gateway.peerDirectory" . }}/secret}
{{- with include "plimsoll.gateway.endpointPicker" . | fromYaml }}
{{- if .enabled }}
- {name: PLIMSOLL_ENDPOINT_PICKER_PORT, value: "9002"}
{{- if .inferenceObjectives }}
- {name: PLIMSOLL_INFERENCE_OBJECTIVES, value: "true"}
{{- end }}
{{- if .tls.secretName }}
- {name: PLIMSOLL_ENDPOINT_PICKER_TLS_DIR, value: /etc/plimsoll-endpoint-picker}
{{- end }}
{{- end }}
{{- end }}
- {name: PLIMSOLL_DRAIN_SECONDS, value: {{ int64 .Values.gateway.drainSeconds | quote }}}
{{ include "plimsoll.podEnv" . }}
{{- end }}
