// The programs of a Kubernetes node in one file, a third of their size: it runs as what it is called, as busybox does.
package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"

	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"
	"github.com/spf13/cobra"
	"k8s.io/client-go/util/cert"
	"k8s.io/client-go/util/keyutil"
	"k8s.io/component-base/cli"
	kubectl "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllers "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"

	_ "github.com/coredns/coredns/plugin/bind"
	_ "github.com/coredns/coredns/plugin/cache"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	_ "github.com/coredns/coredns/plugin/loadbalance"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
)

var programs = map[string]func() *cobra.Command{
	"kube-apiserver":          apiserver.NewAPIServerCommand,
	"kube-controller-manager": controllers.NewControllerManagerCommand,
	"kube-scheduler":          func() *cobra.Command { return scheduler.NewSchedulerCommand() },
	"kube-proxy":              proxy.NewProxyCommand,
	"kubelet":                 func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) },
	"kubectl":                 kubectl.NewDefaultKubectlCommand,
	"pki":                     func() *cobra.Command { return &cobra.Command{Use: "pki FOLDER ADDRESS...", RunE: writeKeys} },
}

// writeKeys makes the API server's certificate, which ends with its authority's, its key and that of service accounts.
func writeKeys(_ *cobra.Command, words []string) error {
	folder, addresses := words[0], []net.IP{}
	for _, word := range words[1:] {
		addresses = append(addresses, net.ParseIP(word))
	}
	names := []string{"kubernetes", "kubernetes.default", "kubernetes.default.svc"}
	chain, key, err := cert.GenerateSelfSignedCertKey("localhost", addresses, names)
	if err != nil {
		return err
	}
	accounts, err := keyutil.MakeEllipticPrivateKeyPEM()
	if err != nil {
		return err
	}
	for name, content := range map[string][]byte{"apiserver.crt": chain, "apiserver.key": key, "accounts.key": accounts} {
		if err := os.WriteFile(filepath.Join(folder, name), content, 0o600); err != nil {
			return err
		}
	}
	return nil
}

func main() {
	name := filepath.Base(os.Args[0])
	if name == "coredns" {
		dnsserver.Directives = []string{"bind", "errors", "cache", "loadbalance", "kubernetes"}
		coremain.Run()
		return
	}
	command, found := programs[name]
	if !found {
		fmt.Fprintf(os.Stderr, "%s: not one of the programs in this file\n", name)
		os.Exit(2)
	}
	os.Exit(cli.Run(command()))
}
