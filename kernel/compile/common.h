/*
 * The headers that most of the kernel's files include, compiled once (a precompiled header). cc.sh gives it to each
 * compilation in which it cannot change the result; that is two thirds of the build's time saved. It holds no code.
 */
#include <linux/compiler-version.h>
#include <linux/kconfig.h>
#include <linux/compiler_types.h>

/* kbuild gives these to each file on the command line; here they only have to exist. names.h replaces them. */
#define KBUILD_MODNAME "common"
#define KBUILD_BASENAME "common"
#define KBUILD_MODFILE "common"

#include <linux/module.h>
#include <linux/slab.h>
#include <linux/mm.h>
#include <linux/fs.h>
#include <linux/sched/signal.h>
#include <linux/blkdev.h>
#include <linux/pci.h>
#include <linux/acpi.h>
#include <linux/cgroup.h>
#include <linux/bpf.h>
#include <linux/filter.h>
#include <linux/netdevice.h>
#include <linux/netfilter.h>
#include <net/sock.h>
#include <net/tcp.h>
#include <net/ip.h>
#include <net/ipv6.h>
