// The controller of kube-router that enforces NetworkPolicies, alone: without its routes, its proxy and their libraries.
package main

import (
	"os"
	"os/signal"
	"sync"
	"syscall"

	"github.com/cloudnativelabs/kube-router/v2/pkg/controllers/netpol"
	"github.com/cloudnativelabs/kube-router/v2/pkg/healthcheck"
	"github.com/cloudnativelabs/kube-router/v2/pkg/options"
	"github.com/spf13/pflag"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
)

func check(err error) {
	if err != nil {
		klog.Fatal(err)
	}
}

func main() {
	config := options.NewKubeRouterConfig()
	config.AddFlags(pflag.CommandLine)
	pflag.Parse()
	access, err := rest.InClusterConfig()
	check(err)
	client, err := kubernetes.NewForConfig(access)
	check(err)
	stop := make(chan struct{})
	factory := informers.NewSharedInformerFactory(client, 0)
	pods := factory.Core().V1().Pods().Informer()
	namespaces := factory.Core().V1().Namespaces().Informer()
	policies := factory.Networking().V1().NetworkPolicies().Informer()
	factory.Start(stop)
	factory.WaitForCacheSync(stop)
	tables, sets, err := netpol.NewIPTablesHandlers(config)
	check(err)
	var lock sync.Mutex
	controller, err := netpol.NewNetworkPolicyController(client, config, pods, policies, namespaces, &lock, tables, sets)
	check(err)
	_, err = pods.AddEventHandler(controller.PodEventHandler)
	check(err)
	_, err = namespaces.AddEventHandler(controller.NamespaceEventHandler)
	check(err)
	_, err = policies.AddEventHandler(controller.NetworkPolicyEventHandler)
	check(err)
	beats := make(chan *healthcheck.ControllerHeartbeat)
	go func() {
		for range beats {
		}
	}()
	var running sync.WaitGroup
	running.Add(1)
	go controller.Run(beats, stop, &running)
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGINT, syscall.SIGTERM)
	<-ended
	close(stop)
	running.Wait()
	controller.Cleanup() // leaves the node as it was
}
