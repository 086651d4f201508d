-- Health of an LLMService for Argo CD, from its conditions: docs/resource.md, "Situations".
-- In the ConfigMap argocd-cm, key resource.customizations.health.tandem.dev_LLMService.
local health = {}
local status = obj.status or {}
local found = {}
for _, condition in ipairs(status.conditions or {}) do
  found[condition.type] = condition
end
local ready, degraded, progressing = found.Ready, found.Degraded, found.Progressing

if (status.observedGeneration or 0) < (obj.metadata.generation or 1) then
  health.status = "Progressing"
  health.message = "no operator has looked at this generation yet; is the namespace watched?"
elseif found.Accepted ~= nil and found.Accepted.status == "False" then
  health.status = "Degraded"
  health.message = found.Accepted.message
elseif ready ~= nil and ready.reason == "Suspended" then
  health.status = "Suspended"
  health.message = ready.message
elseif degraded ~= nil and degraded.status == "True" then
  health.status = "Degraded"
  health.message = degraded.message
elseif progressing ~= nil and progressing.status == "True" then
  health.status = "Progressing"
  health.message = progressing.message
elseif ready ~= nil and ready.status == "True" then
  health.status = "Healthy"
  health.message = ready.message
else
  health.status = "Progressing"
  health.message = ready ~= nil and ready.message or "no condition yet"
end
return health
