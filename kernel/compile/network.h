/*
 * Compiled once (a precompiled header) and given by cc.sh to each compilation in which it cannot change the result: the headers that
 * files of the network and of BPF include.
 * It holds no code. Loading it costs time too, by its size, hence several.
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
#include <linux/cgroup.h>
#include <linux/bpf.h>
#include <linux/filter.h>
#include <linux/netdevice.h>
#include <linux/netfilter.h>
#include <net/sock.h>
#include <net/tcp.h>
#include <net/ip.h>
#include <net/ipv6.h>
