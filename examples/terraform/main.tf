# The InferenceService chat by Terraform's Kubernetes provider. Planning needs the CRD in the cluster: install the chart
# before, by a configuration of its own. No field is computed: the operator changes nothing but the status.
terraform {
  required_providers {
    kubernetes = {
      source  = "hashicorp/kubernetes"
      version = ">= 2.20"
    }
  }
}

provider "kubernetes" {
  config_path = "~/.kube/config"
}

resource "kubernetes_manifest" "chat" {
  manifest = {
    apiVersion = "plimsoll.dev/v1alpha1"
    kind       = "InferenceService"
    metadata = {
      name      = "chat"
      namespace = "team"
    }
    spec = {
      model = {
        uri = "hf://Qwen/Qwen3-8B"
      }
      slo = {
        ttft = "500ms"
        tpot = "50ms"
      }
      admission = {
        classes = [
          {
            name     = "people"
            priority = 10
          },
          {
            name = "jobs"
          },
        ]
      }
      tiers = {
        serve = {
          minReplicas = 1
          maxReplicas = 8
        }
      }
    }
  }

  wait {
    condition {
      type   = "Ready"
      status = "True"
    }
  }

  timeouts {
    create = "30m"
    update = "30m"
  }
}
