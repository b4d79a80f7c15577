// Package decryptor stands for Flux's own, which has the client libraries of seven key services: it refuses encrypted manifests.
package decryptor

import (
	"context"
	"errors"

	"github.com/fluxcd/pkg/cache"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/kustomize/api/resource"

	kustomizev1 "github.com/fluxcd/kustomize-controller/api/v1"
)

type Decryptor struct{}

type Option func(*Decryptor)

func WithRoot(string) Option                 { return nil }
func WithTokenCache(cache.TokenCache) Option { return nil }
func WithSOPSAgeSecret(_, _ string) Option   { return nil }
func WithVaultConfigMap(_, _ string) Option  { return nil }

func New(_ client.Client, obj *kustomizev1.Kustomization, _ ...Option) (*Decryptor, func(), error) {
	if obj.Spec.Decryption != nil {
		return nil, nil, errors.New("spec.decryption: this build has no decryption")
	}
	return &Decryptor{}, func() {}, nil
}

func (*Decryptor) ImportKeys(context.Context) error                               { return nil }
func (*Decryptor) SetAuthOptions(context.Context)                                 {}
func (*Decryptor) DecryptSources(string) error                                    { return nil }
func (*Decryptor) DecryptResource(*resource.Resource) (*resource.Resource, error) { return nil, nil }
func IsEncryptedSecret(*unstructured.Unstructured) bool                           { return false }
func IsDecryptionDisabled(map[string]string) bool                                 { return true }
