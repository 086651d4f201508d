{{- /* Fills missing values with the chart's own. `helm upgrade --reuse-values` uses only the values of the
earlier release, so newer blocks are missing. Each template begins with this. */ -}}
{{- define "tandem.values" -}}
{{- $defaults := .Files.Get "defaults.yaml" | fromYaml -}}
{{- /* null removes the pods' security context; a release without one of these blocks has no such value. */ -}}
{{- if and (hasKey .Values "aggregateRoles") (hasKey .Values "tracing") (hasKey .Values "nodeAgent") -}}
{{- $_ := unset $defaults "podSecurityContext" -}}
{{- end -}}
{{- include "tandem.fill" (list .Values $defaults) -}}
{{- end }}

{{- /* Fills the missing keys of a map, by (list MAP DEFAULTS). Maps with keys of the user are taken as a
whole. */ -}}
{{- define "tandem.fill" -}}
{{- $values := index . 0 -}}
{{- range $key, $default := index . 1 -}}
{{- $value := get $values $key -}}
{{- if or (not (hasKey $values $key)) (and (kindIs "invalid" $value) (not (kindIs "invalid" $default))) -}}
{{- $_ := set $values $key $default -}}
{{- else if and (kindIs "map" $value) (kindIs "map" $default) (not (has $key (list "resources" "podSecurityContext" "labels" "annotations"))) -}}
{{- include "tandem.fill" (list $value $default) -}}
{{- end -}}
{{- end -}}
{{- end }}
