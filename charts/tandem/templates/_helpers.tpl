{{- define "tandem.name" -}}
{{- $name := .Values.nameOverride | default "tandem" -}}
{{- if .Values.fullnameOverride }}{{ .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else if contains $name .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- /* The name of objects outside namespaces: another namespace may have a release of the same name. */ -}}
{{- define "tandem.clusterName" -}}
{{ include "tandem.name" . }}-{{ .Release.Namespace }}
{{- end }}

{{- define "tandem.selector" -}}
app.kubernetes.io/name: tandem-operator
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "tandem.labels" -}}
{{ include "tandem.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "tandem.agentSelector" -}}
app.kubernetes.io/name: tandem-node-agent
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "tandem.agentLabels" -}}
{{ include "tandem.agentSelector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "tandem.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (include "tandem.name" .) }}
{{- end }}

{{- /* Image of the operator; a digest wins over the tag. */ -}}
{{- define "tandem.image" -}}
{{- $image := printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) -}}
{{- with .Values.image.digest }}{{ $image = printf "%s@%s" $.Values.image.repository . }}{{ end -}}
{{ include "tandem.withRegistry" (list . $image) }}
{{- end }}

{{- /* An image, by (list . IMAGE), from global.imageRegistry if that is set. */ -}}
{{- define "tandem.withRegistry" -}}
{{- $registry := (index . 0).Values.global | default dict | dig "imageRegistry" "" | trimSuffix "/" -}}
{{- $image := index . 1 -}}
{{- if and $registry $image -}}
{{- $parts := splitList "/" $image -}}
{{- $host := first $parts -}}
{{- if and (gt (len $parts) 1) (or (contains "." $host) (contains ":" $host) (eq "localhost" $host)) -}}
{{- $parts = rest $parts -}}
{{- end -}}
{{ $registry }}/{{ join "/" $parts }}
{{- else -}}
{{ $image }}
{{- end -}}
{{- end }}

{{- /* Image of services, by (list . ROLE VALUE); empty is the operator's default. */ -}}
{{- define "tandem.serviceImage" -}}
{{- $root := index . 0 -}}
{{- $image := index . 2 -}}
{{- if and (not $image) ($root.Values.global | default dict | dig "imageRegistry" "") -}}
{{- $image = printf "ghcr.io/tandem-serving/tandem-%s:%s" (index . 1) $root.Chart.AppVersion -}}
{{- end -}}
{{ include "tandem.withRegistry" (list $root $image) }}
{{- end }}

{{- /* Pull secrets of the release's own pods, as JSON: global.imagePullSecrets (names, or maps with a
name) and imagePullSecrets. */ -}}
{{- define "tandem.pullSecrets" -}}
{{- $found := list -}}
{{- range concat (.Values.global | default dict | dig "imagePullSecrets" list) (.Values.imagePullSecrets | default list) -}}
{{- $found = append $found (kindIs "string" . | ternary (dict "name" .) .) -}}
{{- end -}}
{{ uniq $found | toJson }}
{{- end }}

{{- define "tandem.installsCrd" -}}
{{- include "tandem.values" .root -}}
{{- if .root.Values.crds.install -}}
{{- $there := lookup "apiextensions.k8s.io/v1" "CustomResourceDefinition" "" .name -}}
{{- $notes := dig "metadata" "annotations" (dict) $there -}}
{{- $name := get $notes "meta.helm.sh/release-name" -}}
{{- $namespace := get $notes "meta.helm.sh/release-namespace" -}}
{{- if or (not $there) .root.Values.crds.adopt (and (eq $name .root.Release.Name) (eq $namespace .root.Release.Namespace)) -}}
true
{{- end -}}
{{- end -}}
{{- end }}

{{- define "tandem.rules" -}}
- apiGroups: [tandem.dev]
  resources: [llmservices]
  verbs: [get, list, watch]
- apiGroups: [tandem.dev]
  resources: [llmservices/status, llmrolescalers/status]
  verbs: [patch]
- apiGroups: [tandem.dev]
  resources: [llmservices/finalizers] # owner references that block deletion, on OpenShift
  verbs: [update]
- apiGroups: [tandem.dev]
  resources: [llmrolescalers]
  verbs: [get, list, watch, create, delete]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, update, delete]
- apiGroups: [apps]
  resources: [controllerrevisions] # templates: created once, never changed
  verbs: [get, list, watch, create, delete]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, delete]
- apiGroups: [""]
  resources: [configmaps, services]
  verbs: [get, list, watch, create, patch, update]
- apiGroups: [""]
  resources: [serviceaccounts]
  verbs: [get, list, watch, create, patch]
- apiGroups: [""]
  resources: [secrets] # CURVE keys: created once, read and deleted, never changed
  verbs: [get, list, watch, create, delete]
- apiGroups: [""]
  resources: [pods] # create: only as a dry run, to check Pod Security
  verbs: [get, list, watch, create, patch]
- apiGroups: [""]
  resources: [pods/status] # marks silent routers unready
  verbs: [patch]
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get]
- apiGroups: [""]
  resources: [events]
  verbs: [create]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, update, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, update]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [roles, rolebindings]
  verbs: [get, list, watch, create, patch, update]
{{- end }}

{{- /* Ports of policies, as JSON. `helm upgrade --reuse-values` has none if the earlier release had
none, and a rule without ports would open all. */ -}}
{{- define "tandem.apiServerPorts" -}}
{{ .Values.networkPolicy.apiServerPorts | default (list 443 6443) | toJson }}
{{- end }}

{{- define "tandem.dnsPorts" -}}
{{ .Values.networkPolicy.dnsPorts | default (list 53) | toJson }}
{{- end }}

{{/* Port of a URL, or the default port of its scheme. */}}
{{- define "tandem.tracingPort" -}}
{{- $url := urlParse . -}}
{{- if regexMatch ":[0-9]+$" $url.host -}}
{{- regexFind "[0-9]+$" $url.host -}}
{{- else if eq $url.scheme "https" -}}
443
{{- else -}}
80
{{- end -}}
{{- end -}}

{{- /* Volume of each of nodeAgent.claims, by NAMESPACE/NAME (volumes), and the claim of each volume (owners),
as JSON. An existing claim keeps its volume, also if two share it. Without a cluster (helm template) the
first of several equal volume names is kept, and the others get a digest. */ -}}
{{- define "tandem.nodeVolumes" -}}
{{- $volumes := dict }}
{{- $owners := dict }}
{{- range .Values.nodeAgent.claims }}
{{- $claim := printf "%s/%s" .namespace .name }}
{{- $found := lookup "v1" "PersistentVolumeClaim" .namespace .name }}
{{- $ours := dig "metadata" "labels" "app.kubernetes.io/instance" "" $found | eq $.Release.Name }}
{{- $there := dig "spec" "volumeName" "" $found }}
{{- if and $ours $there }}
{{- $_ := set $volumes $claim $there }}
{{- $bound := dig "spec" "claimRef" (dict) (lookup "v1" "PersistentVolume" "" $there) }}
{{- $is := and (eq (get $bound "namespace") .namespace) (eq (get $bound "name") .name) }}
{{- if or $is (not (hasKey $owners $there)) }}
{{- $_ := set $owners $there $claim }}
{{- end }}
{{- end }}
{{- end }}
{{- range .Values.nodeAgent.claims }}
{{- $claim := printf "%s/%s" .namespace .name }}
{{- $volume := printf "%s-%s-%s" (include "tandem.name" $) .namespace .name | trunc 63 | trimSuffix "-" }}
{{- if hasKey $owners $volume }}
{{- $volume = printf "%s-%s" ($volume | trunc 54 | trimSuffix "-") ($claim | sha256sum | trunc 8) }}
{{- end }}
{{- if not (hasKey $volumes $claim) }}
{{- $_ := set $volumes $claim $volume }}
{{- $_ := set $owners $volume $claim }}
{{- end }}
{{- end }}
{{- dict "volumes" $volumes "owners" $owners | toJson }}
{{- end }}

{{- /* Variables of an admission policy: containers of variables.pod, and all security contexts. */}}
{{- define "tandem.podContexts" -}}
- name: containers
  expression: >-
    variables.pod.containers + variables.pod.?initContainers.orValue([])
    + variables.pod.?ephemeralContainers.orValue([])
- name: contexts
  expression: >-
    [variables.pod.?securityContext.orValue({})]
    + variables.containers.map(c, c.?securityContext.orValue({}))
{{- end }}

{{- /* Workers trust the socket of the agent's user, so no worker pod may run as it. */}}
{{- define "tandem.notTheAgent" -}}
- expression: >-
    variables.contexts.all(c, c.?runAsUser.orValue(0) != 65533
    && c.?runAsGroup.orValue(0) != 65533 && c.?fsGroup.orValue(0) != 65533
    && !(65533 in c.?supplementalGroups.orValue([])))
  message: user 65533 is reserved for the node agent
{{- end }}
