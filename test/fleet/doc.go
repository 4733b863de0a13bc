// Package fleet holds the tests of whole daemons on real verbs. They run as root in a guest of the lab, where node and fault
// are commands: `make test-fleet`.
package fleet
